"""Checkpoints of the trainer: folders that appear whole or not at all."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..store.errors import JobError, StoreError

Writer = Callable[[Path], object]
"""Writes one file to the path it is given."""


def write_folder(target: Path, files: Mapping[str, Writer], *, durable: bool = False) -> None:
    """Make a folder of files under another name, then rename it, so that it is never half there.

    `durable` waits until the disk has it. A folder that exists already is replaced. Raises
    StoreError when it cannot be written, as on a full disk; then the old folder is as it was.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with writing(target, partial=partial):
        partial.mkdir(parents=True)
        for name, write in files.items():
            write(partial / name)
            if durable:
                _sync(partial / name)
    remove_folder(target)
    partial.rename(target)
    if durable:
        _sync(target.parent)


@contextmanager
def writing(target: Path, *, partial: Path) -> Iterator[None]:
    """Turn what libraries raise when they cannot write into StoreError, and remove `partial`."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # torch raises the last of these
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        raise StoreError(
            f"cannot write `{target}`: {reason}; nothing half-written is left"
        ) from error


def remove_folder(target: Path) -> None:
    """Remove a folder, if it is there, so that it is never half there."""
    gone = target.with_name(f".{target.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if target.exists():
        target.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Checkpoints:
    """The trainer's state after some steps, in `folder`/step-000050; the newest `keep` are kept."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def steps(self) -> list[int]:
        """Return the steps there are checkpoints of, oldest first."""
        found = self._folder.glob("step-*") if self._folder.is_dir() else []
        return sorted(int(p.name.removeprefix("step-")) for p in found)

    def set_aside(self, *, after: int) -> None:
        """Rename the checkpoints of later steps, so that they do not count any more."""
        for step in self.steps():
            if step > after:
                aside = self._path(step).with_name(f"undone-{self._path(step).name}")
                remove_folder(aside)
                self._path(step).rename(aside)

    def write(self, step: int, *, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Store tensors (anything that `torch.load(weights_only=True)` reads) and plain facts."""
        write_folder(
            self._path(step),
            {
                "state.pt": lambda path: torch.save(dict(tensors), path),
                "facts.json": lambda path: path.write_text(json.dumps(dict(facts))),
            },
            durable=True,
        )
        for old in self.steps()[: -self._keep]:
            remove_folder(self._path(old))

    def read(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the tensors and the facts of a checkpoint."""
        path = self._path(step)
        try:
            tensors = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
            return tensors, json.loads((path / "facts.json").read_text())
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise JobError(
                f"checkpoint `{path}` cannot be read: {reason}; remove it to resume "
                "from the one before"
            ) from error

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"
