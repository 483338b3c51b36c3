"""Published weights: files, versions and digests, and loading them into a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

from dataclasses import field

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from ...store.errors import JobError
from . import adapter_files
from .digest import weights_digest
from .state_dict import put_state


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A version of a policy's weights, in a folder or in memory."""

    version: int
    digest: str
    folder: Path | None = None
    """In the Hugging Face format, or peft's; None when they come in memory."""
    state: "Mapping[str, Tensor] | None" = None
    """Tensors by name, which nobody changes while an engine takes them in."""
    address: str | None = None
    """Where the trainer sends them; `loop.weights.fetched` has them in memory."""


WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class PublishedWeights:
    """A row of `policies`: which weights, and where."""

    version: int
    folder: Path
    """Where they lie, or would lie: not all are written."""
    digest: str
    address: str | None = None
    """Where the trainer sends them."""
    state: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)
    """The tensors, when trainer and explorer are one process."""

    @property
    def file(self) -> Path:
        """Where the weights lie, of a whole model or of an adapter."""
        return file_of(self.folder)

    @property
    def weights(self) -> Weights:
        """What an engine takes in; weights that are only sent must be fetched before."""
        return Weights(
            version=self.version,
            digest=self.digest,
            folder=self.folder if self.state is None else None,
            state=self.state,
            address=self.address,
        )


def file_of(folder: Path) -> Path:
    """Return the file of weights in a folder, of a whole model or of an adapter."""
    return folder / (adapter_files.WEIGHTS if adapter_files.is_adapter(folder) else WEIGHTS)


def check_weights(weights: PublishedWeights) -> None:
    """Raise JobError when published weights are gone, or not what they were."""
    path = weights.file
    if not path.is_file():
        raise JobError(f"the weights of version {weights.version} are gone: there is no `{path}`")
    try:
        intact = weights_digest(load_file(path)) == weights.digest
    except SafetensorError:
        intact = False
    if not intact:
        raise JobError(
            f"`{path}` is not what was published: its digest is another; restore or retrain it"
        )


def load_into(model: PreTrainedModel, weights: PublishedWeights) -> None:
    """Put published weights into a model of the same shape; JobError when they are damaged."""
    check_weights(weights)
    path = weights.file
    put_state(model, load_file(path), told=f"`{path}`")
