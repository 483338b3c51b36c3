"""Weights that stay at a server of Tinker's API: the file that says where, and what saves them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ...store.ids import content_id

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "tinker.json"
"""In the folder of a version whose weights are at a server, next to configuration and tokenizer."""


@dataclass(frozen=True, kw_only=True)
class RemoteWeights:
    """Weights at a server, which do not change under their path."""

    path: str
    """Their address there, `tinker://...`."""
    base_model: str
    base_url: str | None = None
    """Address of the server; None: the one that the client finds by itself."""

    @property
    def digest(self) -> str:
        """The digest of their path: the numbers are not here."""
        return content_id(self.path, length=16)

    def write(self, file: Path) -> None:
        """Write the file that `read` reads."""
        file.write_text(json.dumps(asdict(self)))


def is_remote(folder: str | Path) -> bool:
    """Return whether a folder says only where its weights are."""
    return (Path(folder) / FILE).is_file()


def read(folder: Path) -> RemoteWeights:
    """Return where the weights of a folder are."""
    return RemoteWeights(**json.loads((folder / FILE).read_text()))


def not_here(folder: Path) -> str:
    """Return why the weights of a folder cannot be loaded, and what to do."""
    found = read(folder)
    server = found.base_url or "Thinking Machines' service"
    return (
        f"the weights in `{folder}` are not here: they are `{found.path}` at the server "
        f"`{server}`; sample from them with `engine: tinker`"
    )


@runtime_checkable
class RemoteModel(Protocol):
    """A model whose weights are at a server."""

    architecture: "PreTrainedModel"
    """The model without numbers."""

    def save(self, name: str) -> RemoteWeights:
        """Keep the current weights at the server under a new name, to be sampled from."""
        ...
