"""Materialize weights for vLLM: a folder with a complete model, whatever form they come in."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ....store.errors import JobError
from ...models.adapter_files import is_adapter
from ...models.load import load_folder
from ...models.lora import merge
from ...models.state_dict import difference, put_state, state_of, weights_digest
from ...models.weights import Weights, check_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "model.safetensors"


@dataclass(frozen=True)
class MaterializedWeights:
    """A version's weights, in a folder that vLLM can load."""

    version: int
    digest: str | None
    """The recorded digest; for an adapter, of the adapter alone."""
    folder: Path
    file_digest: str | None
    """The digest of the file that is loaded."""


class WeightFolders:
    """Makes temporary folders of complete models, where none exist already."""

    def __init__(self, first: Path, *, dtype: str) -> None:
        """Use the settings and the tokenizer of the model in `first`."""
        self._first, self._dtype = first, dtype
        self._place = TemporaryDirectory(prefix="rlake-weights-", ignore_cleanup_errors=True)
        self._made = 0
        self._shapes: dict[str, Tensor] | None = None

    def start(self) -> MaterializedWeights:
        """Return the folder from which an engine starts; nothing is sampled from it."""
        folder = self._first
        if is_adapter(folder):
            folder = self._save_model(load_folder(folder, dtype=self._dtype)[0])
        return MaterializedWeights(0, None, folder, None)

    def whole(self, weights: Weights) -> MaterializedWeights:
        """Return weights as a folder.

        Raises JobError if they are missing, damaged, or of another model.
        """
        if weights.state is not None:
            return self._of_state(weights)
        assert weights.folder is not None, "weights come in a folder or in memory"
        if is_adapter(weights.folder):
            check_weights(weights)
            return self._of_model(weights, load_folder(weights.folder, dtype=self._dtype)[0])
        self._check(weights.existing_file())
        return MaterializedWeights(weights.version, weights.digest, weights.folder, weights.digest)

    def forget(self, *, but: MaterializedWeights) -> None:
        """Remove the folders of other versions."""
        for folder in Path(self._place.name).iterdir():
            if folder != but.folder:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all folders."""
        self._place.cleanup()

    def _of_state(self, weights: Weights) -> MaterializedWeights:
        state = dict(weights.state or {})
        if (found := weights_digest(state)) != weights.digest:
            raise JobError(
                f"what came of version {weights.version} has digest {found}, "
                f"expected {weights.digest}"
            )
        if any(".lora_" in name for name in state):
            model = load_folder(self._first, dtype=self._dtype)[0]
            put_state(model, state)
            return self._of_model(weights, model)
        folder = self._save(state)
        self._check(folder / FILE)
        return MaterializedWeights(weights.version, weights.digest, folder, weights.digest)

    def _of_model(self, weights: Weights, model: "PreTrainedModel") -> MaterializedWeights:
        folder = self._save_model(model)
        self._check(folder / FILE)
        digest = weights_digest(load_file(folder / FILE))
        return MaterializedWeights(weights.version, weights.digest, folder, digest)

    def _save_model(self, model: "PreTrainedModel") -> Path:
        if getattr(model, "peft_config", None):
            merge(model)
        folder = self._save(state_of(model))
        model.config.save_pretrained(folder)
        return folder

    def _save(self, state: Mapping[str, Tensor]) -> Path:
        """Write tensors to a new folder, with the first one's settings and tokenizer."""
        self._made += 1
        folder = Path(self._place.name) / str(self._made)
        folder.mkdir()
        for path in self._first.iterdir():
            if path.suffix != ".safetensors" and path.is_file():
                shutil.copyfile(path, folder / path.name)
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        save_file(contiguous, folder / FILE, metadata={"format": "pt"})
        return folder

    def _check(self, file: Path) -> None:
        """Raise JobError if the tensors of a file have other shapes than earlier ones."""
        found = _shapes(file)
        if self._shapes is None:
            self._shapes = found
        elif (message := difference(self._shapes, found)) is not None:
            raise JobError(f"`{file}` belongs to another model: {message}")


def _shapes(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file on the meta device, without reading them."""
    try:
        with safe_open(file, framework="pt") as opened:
            shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise JobError(
            f"`{file}` is not what was published: {error}; restore or retrain it"
        ) from error
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
