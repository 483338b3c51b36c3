"""Published weights: files, versions and digests, and loading them into a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...store.errors import JobError
from . import adapter_files, remote_weights
from .state_dict import weights_digest

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A version of a policy's weights: in a folder, in memory, or at an address."""

    version: int
    digest: str
    folder: Path | None = None
    """In the Hugging Face format, or peft's."""
    state: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)
    """Tensors by name, which take precedence; they must not change while an engine loads them."""
    address: str | None = None
    """Where the trainer sends them; `weight_sync.fetch` receives them."""

    @property
    def file(self) -> Path:
        """The file in `folder`."""
        assert self.folder is not None, "weights without tensors are in a folder"
        return file_of(self.folder)

    def existing_file(self) -> Path:
        """Return the file in `folder`. Raises JobError if it does not exist."""
        if not (path := self.file).is_file():
            kept = sorted(int(p.name[1:]) for p in path.parents[1].glob("v" + "[0-9]" * 6))
            others = f"; kept are those from version {kept[0]} to {kept[-1]}" if kept else ""
            raise JobError(
                f"the weights of version {self.version} are gone: `{path}` does not exist{others}"
            )
        return path


@dataclass(frozen=True, kw_only=True)
class PublishedWeights(Weights):
    """A row of `policies`. The folder may not exist, since not every version is written."""

    folder: Path = field()


def file_of(folder: Path) -> Path:
    """Return the file of weights in a folder, or the one that says at which server they are."""
    if remote_weights.is_remote(folder):
        return folder / remote_weights.FILE
    return folder / (adapter_files.WEIGHTS if adapter_files.is_adapter(folder) else WEIGHTS)


def check_weights(weights: Weights) -> Path:
    """Return the file of published weights. Raises JobError if it is gone or damaged."""
    path = weights.existing_file()
    if path.name == remote_weights.FILE:
        raise JobError(remote_weights.not_here(path.parent))
    try:
        intact = weights_digest(load_file(path)) == weights.digest
    except SafetensorError:
        intact = False
    if not intact:
        raise JobError(
            f"`{path}` is not what was published: its digest differs; restore or retrain it"
        )
    return path
