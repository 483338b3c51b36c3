"""Weights on their way to engines in other processes, whatever form a version comes in."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from ...store.errors import JobError
from ..models.adapter_files import SETTINGS, WEIGHTS, base_of, is_adapter, name_base, rope_in
from ..models.load import as_type, load_base, load_folder
from ..models.lora import merge
from ..models.rope import set_rope
from ..models.state_dict import difference, state_of, weights_digest
from ..models.weights import Weights, check_weights, file_of


@dataclass(frozen=True)
class IncomingWeights:
    """A version's weights as an engine loads them: from a file, or as tensors in memory."""

    version: int
    digest: str | None
    """The recorded digest, which is stamped on tokens."""
    loaded_digest: str | None
    """The digest of the tensors that are loaded; another one for an adapter that is merged.

    None: the engine has them from its start.
    """
    file: Path | None = None
    state: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)
    adapter: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)
    """The settings of an adapter that is loaded as one, as peft writes them."""

    @property
    def name(self) -> str:
        """What they are called in messages."""
        return f"`{self.file}`" if self.file else f"what came of version {self.version}"


class WeightSource:
    """Finds what an engine starts with, and what it loads for each version."""

    def __init__(self, first: Path, *, dtype: str, merge_adapter: bool = False) -> None:
        """Serve the model in `first`; of an adapter its base model and the adapter.

        With `merge_adapter` each version of the adapter is merged into the base model.
        """
        self._first, self._dtype = first, dtype
        self._shapes: dict[str, Tensor] | None = None
        self._is_adapter = is_adapter(first)
        self.adapter: dict[str, Any] | None = None
        """The settings of an adapter that is not merged."""
        if self._is_adapter and not merge_adapter:
            self.adapter = json.loads((first / SETTINGS).read_text())
        # Copied: the folder of the first version may be removed while later ones are served.
        self._copies = TemporaryDirectory(prefix="rlake-weights-", ignore_cleanup_errors=True)
        self._model, self._adapter = (Path(self._copies.name) / n for n in ("model", "adapter"))
        for place in (self._model, self._adapter) if self._is_adapter else (self._model,):
            place.mkdir()
            for path in first.iterdir():
                if path.suffix != ".safetensors" and path.is_file():
                    shutil.copyfile(path, place / path.name)
        if self._is_adapter:
            name_base(first, self._adapter)
            settings = AutoConfig.from_pretrained(base_of(first)[0])
            set_rope(settings, rope_in(first))
            settings.save_pretrained(self._model)

    def start(self) -> IncomingWeights:
        """Return the weights with which an engine starts, before a version is loaded."""
        if not self._is_adapter:
            return IncomingWeights(0, None, None, file=file_of(self._first))
        return self._of_adapter(0, None, load_file(file_of(self._first)))

    def folder(self, served: IncomingWeights) -> tuple[Path, bool]:
        """Return a folder from which an engine starts, and whether the served weights are in it."""
        return (self._model, False) if served.file is None else (served.file.parent, True)

    @property
    def settings(self) -> Path:
        """A folder with the model's configuration and tokenizer, without weights."""
        return self._model

    def base(self) -> IncomingWeights | None:
        """Return the base model of an adapter that is not merged, which an engine loads once."""
        if self.adapter is None:
            return None
        state = state_of(as_type(load_base(self._adapter)[0], self._dtype))
        return IncomingWeights(0, None, weights_digest(state), state=state)

    def incoming(self, weights: Weights) -> IncomingWeights:
        """Return what an engine loads for a version.

        Raises JobError if it is missing, damaged, or of another model.
        """
        if weights.state is not None:
            state, source = dict(weights.state), f"what came of version {weights.version}"
            if not self._is_adapter:
                self._check(state, source)
                return IncomingWeights(weights.version, weights.digest, weights.digest, state=state)
        else:
            path = weights.existing_file()
            if not self._is_adapter:
                self._check(_shapes(path), f"`{path}`")
                return IncomingWeights(weights.version, weights.digest, weights.digest, file=path)
            state, source = load_file(check_weights(weights)), f"`{path}`"
        self._check(state, source)
        if (found := weights_digest(state)) != weights.digest:
            raise JobError(f"{source} has digest {found}, expected {weights.digest}")
        return self._of_adapter(weights.version, weights.digest, state)

    def close(self) -> None:
        """Remove what was copied."""
        self._copies.cleanup()

    def _of_adapter(
        self, version: int, digest: str | None, state: Mapping[str, Tensor]
    ) -> IncomingWeights:
        if self.adapter is not None:
            loaded = digest or weights_digest(state)
            return IncomingWeights(version, digest, loaded, state=state, adapter=self.adapter)
        save_file(dict(state), self._adapter / WEIGHTS)
        model, _ = load_folder(self._adapter, dtype=self._dtype)
        merge(model)
        merged = state_of(model)
        return IncomingWeights(version, digest, weights_digest(merged), state=merged)

    def _check(self, found: Mapping[str, Tensor], source: str) -> None:
        """Raise JobError if tensors have other names or shapes than earlier ones."""
        if self._shapes is None:
            self._shapes = {name: torch.empty_like(t, device="meta") for name, t in found.items()}
        elif (message := difference(self._shapes, found)) is not None:
            raise JobError(f"{source} belongs to another model: {message}")


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
