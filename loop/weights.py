"""Weights go from trainer to explorer as a folder written whole, then a row of `policies`."""

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor
from transformers import PreTrainedModel

from ..store import Store
from ..store.errors import JobError, NotFoundError
from ..store.tail import Tail
from .checkpoints import Writer, remove_folder, write_folder, writing
from .runs import Job, Watch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Published:
    """A row of `policies`: which weights, and where."""

    version: int
    folder: Path
    digest: str


class Publisher:
    """Writes a policy's weights where explorers find them, each version in the Hugging Face format.

    Configuration and tokenizer are written once, and linked into each version's folder.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        run_id: str,
        attempt: int,
        tokenizer: "PreTrainedTokenizerFast",
    ) -> None:
        self._store, self._folder, self._run, self._attempt = store, folder, run_id, attempt
        self._tokenizer = tokenizer
        self._shared: list[Path] = []

    def publish(self, model: PreTrainedModel, version: int, *, parent: int | None) -> str:
        """Write the weights of `version`, then its row; return the digest of the weights file."""
        target = self._folder / "policies" / f"v{version:06d}"
        files = {p.name: _link(p) for p in self._companions(model)}
        write_folder(target, {**files, _WEIGHTS: lambda path: _save(model, path)})
        digest = weights_digest(load_file(target / _WEIGHTS))
        row = {
            "run_id": self._run,
            "attempt": self._attempt,
            "policy_version": version,
            "parent_version": parent,
            "step": version,
            "path": str(target.relative_to(self._folder)),
            "digest": digest,
        }
        self._store.append("policies", [row])
        return digest

    def forget(self, *, before: int) -> None:
        """Remove the folders of versions that nobody can ask for any more; their rows stay."""
        for path in (self._folder / "policies").glob("v*"):
            if int(path.name[1:]) < before:
                remove_folder(path)

    def _companions(self, model: PreTrainedModel) -> list[Path]:
        if not self._shared:
            base = self._folder / "model"
            with writing(base, partial=base):
                base.mkdir(parents=True, exist_ok=True)
                model.config.save_pretrained(base)
                if model.can_generate():
                    model.generation_config.save_pretrained(base)
                self._tokenizer.save_pretrained(base)
            self._shared = sorted(p for p in base.iterdir() if p.is_file())
        return self._shared


class Follower:
    """Finds the published versions of a run that count, reading only new rows of `policies`."""

    def __init__(self, job: Job, watch: Watch) -> None:
        self._job, self._watch = job, watch
        columns = ["attempt", "policy_version", "path", "digest"]
        self._tail = Tail(columns, run_id=job.run_id)
        self._rows: dict[int, list[dict[str, Any]]] = {}

    def find(self, version: int) -> Published | None:
        """Return a version, or None while no attempt that counts has published it."""
        dataset = self._job.store.dataset("policies")
        if self._tail.moved(dataset):
            rows = self._tail.read(dataset).to_pylist()
            if self._tail.restarted:
                self._rows.clear()
            for row in rows:
                self._rows.setdefault(row["policy_version"], []).append(row)
        for row in reversed(self._rows.get(version, [])):
            if self._watch.counts(row["attempt"], version):
                return Published(version, self._job.folder / row["path"], row["digest"])
        return None

    @property
    def newest(self) -> int | None:
        """The newest version seen so far."""
        return max(self._rows, default=None)


def published(store: Store, folder: Path, run_id: str) -> dict[int, Published]:
    """Return the versions of a run that count, by version."""
    rows = store.sql(
        f"SELECT policy_version, path, digest FROM policies_current WHERE run_id = '{run_id}'"
    ).fetchall()
    return {version: Published(version, folder / path, digest) for version, path, digest in rows}


def newest(store: Store, folder: Path, run_id: str) -> Published:
    """Return the newest version of a run; raises NotFoundError when it has none."""
    found = published(store, folder, run_id)
    if not found:
        raise NotFoundError(f"run `{run_id}` has published no weights; train it first")
    return found[max(found)]


def load_into(model: PreTrainedModel, weights: Published) -> None:
    """Put published weights into a model of the same shape; JobError when they are damaged."""
    path = weights.folder / _WEIGHTS
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
    try:
        load_model(model, path)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise JobError(f"`{path}` belongs to another model: {reason}") from error


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Digest names, types, shapes and bytes of tensors; equal weights have equal digests."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _save(model: PreTrainedModel, path: Path) -> None:
    save_model(model, str(path), metadata={"format": "pt"})


def _link(source: Path) -> Writer:
    def write(path: Path) -> None:
        try:
            os.link(source, path)
        except OSError:
            shutil.copyfile(source, path)  # another file system, or one without links

    return write
