"""Checkpoints of the trainer: folders that appear whole or not at all."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from ...store.errors import JobError
from ...store.files.atomic_writer import sync
from ..config import KeepConfig
from ..models.atomic_folder import Writer, partial_of, remove_folder, replace_folder
from . import checkpoint_shards
from .distributed.world import MultiProcess, SingleProcess
from .state_tree import apart, copied, together

WRITE_SECONDS = 1800.0
"""Longest wait for a checkpoint that is written in the background."""
_REST, _FACTS = "rest.pt", "facts.json"


class Checkpoints:
    """The trainer's state after some steps, in `folder`/step-000050; a rule says which are kept.

    Written in the background, by all processes together; read on any number of processes.
    """

    def __init__(
        self, folder: Path, *, keep: KeepConfig, world: SingleProcess | None = None
    ) -> None:
        self._folder, self._keep, self._world = folder, keep, world or SingleProcess()
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._later: Mapping[int, float | None] = {}

    def know(self, measured: Mapping[int, float | None]) -> None:
        """Take the metric that the rule names of steps where it was measured after they ended.

        None: it is still to be measured, and until then the checkpoint is kept.
        """
        self._later = measured

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

    def write(self, step: int, *, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Copy a state of nested dicts with tensors, and begin to store it and plain facts.

        Waits for the checkpoint before, and raises what its writer raised.
        """
        self.wait()
        tensors, rest = apart(state)
        tensors = copied(tensors)
        work = threading.Thread(
            target=self._write, args=(step, tensors, rest, dict(facts)), daemon=True
        )
        work.name = f"checkpoint-{step}"
        self._writer = work
        work.start()

    def wait(self) -> None:
        """Wait until what was begun is on the disk; raises StoreError when it cannot be written."""
        if self._writer is not None:
            self._writer.join(WRITE_SECONDS)
            if self._writer.is_alive():
                raise JobError(
                    f"`{self._writer.name}` in `{self._folder}` is not written after "
                    f"{WRITE_SECONDS:g} s; look at the disk"
                )
            self._writer = None
        self.check()

    def check(self) -> None:
        """Raise what the writer in the background raised, if it did."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self) -> None:
        """Let the writer end, whatever comes of it; others that write may be gone by now."""
        if self._writer is not None:
            self._writer.join(WRITE_SECONDS if self._world.size == 1 else 10.0)

    def read(
        self, step: int, *, like: Mapping[str, Tensor] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state and the facts of a checkpoint.

        Tensors whose path `like` has in parts come in such parts. Raises JobError when the
        checkpoint is damaged.
        """
        path = self._path(step)
        try:
            rest = torch.load(path / _REST, map_location="cpu", weights_only=True)
            tensors = checkpoint_shards.fetch(path, like or {}, self._group)
            return together(tensors, rest), json.loads((path / _FACTS).read_text())
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            message = f"{type(error).__name__}: {checkpoint_shards.reason(error)}"
            raise JobError(
                f"checkpoint `{path}` cannot be read: {message}; remove it to resume from the one "
                "before"
            ) from error

    @property
    def _group(self) -> ProcessGroup | None:
        return self._world.files if isinstance(self._world, MultiProcess) else None

    def _write(
        self, step: int, tensors: dict[str, Tensor], rest: Any, facts: dict[str, Any]
    ) -> None:
        try:
            if self._world.rank == 0:
                self._write_first(step, tensors, rest, facts)
            else:
                checkpoint_shards.store(tensors, partial_of(self._path(step)), self._group)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for this thread
            self._error = error

    def _write_first(
        self, step: int, tensors: dict[str, Tensor], rest: Any, facts: dict[str, Any]
    ) -> None:
        """Write what is not in parts beside the parts; the folder is there when all is written."""

        files: dict[str, Writer] = {
            _REST: lambda path: torch.save(rest, path),
            _FACTS: lambda path: path.write_text(json.dumps(facts)),
        }

        def fill(partial: Path) -> None:
            for name, write in files.items():
                write(partial / name)
                sync(partial / name)
            checkpoint_shards.store(tensors, partial, self._group)

        replace_folder(self._path(step), fill, durable=True)
        self._tidy()

    def _tidy(self) -> None:
        """Remove the checkpoints that no rule keeps."""
        steps = self.steps()
        kept = set(steps[-self._keep.last :])
        if self._keep.every is not None:
            kept |= {step for step in steps if step % self._keep.every == 0}
        kept |= {step for step in steps if self._later.get(step, 0.0) is None}
        best = self._best(steps)
        for step in steps:
            if step not in kept and step != best:
                remove_folder(self._path(step))

    def _best(self, steps: list[int]) -> int | None:
        """Return the newest of the steps whose metric is best, None without such a rule."""
        rule = self._keep
        name = rule.highest or rule.lowest
        if name is None:
            return None
        sign = 1.0 if rule.highest else -1.0
        values = ((self._metric(step, name), step) for step in steps)
        found = [(sign * value, step) for value, step in values if value is not None]
        return max(found)[1] if found else None

    def _metric(self, step: int, name: str) -> float | None:
        if step in self._later:
            return self._later[step]
        facts = json.loads((self._path(step) / _FACTS).read_text())
        return facts.get("metrics", {}).get(name)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"
