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
from ..models.atomic_folder import partial_of, remove_folder, replace_folder
from . import checkpoint_io
from .checkpoint_io import apart, copied, together
from .distributed.world import MultiProcess, SingleProcess

WRITE_SECONDS = 1800.0
"""Longest wait for a checkpoint that is written in the background."""
_REST, _FACTS = "rest.pt", "facts.json"


class Checkpoints:
    """The trainer's state after some steps, in `folder`/step-000050; `keep` says which stay.

    Written in the background, by all processes together; read on any number of processes.
    """

    def __init__(
        self, folder: Path, *, keep: KeepConfig, world: SingleProcess | None = None
    ) -> None:
        self._folder, self._keep, self._world = folder, keep, world or SingleProcess()
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._later: Mapping[int, float | None] = {}

    def update_metric(self, evaluated: Mapping[int, float | None]) -> None:
        """Set the metric that chooses the best, by step, where it was evaluated after the step.

        None: still to be evaluated; until then the checkpoint is kept.
        """
        self._later = evaluated

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first."""
        found = self._folder.glob("step-*") if self._folder.is_dir() else []
        return sorted(int(p.name.removeprefix("step-")) for p in found)

    def set_aside(self, *, after: int) -> None:
        """Rename the checkpoints of later steps, so that no run resumes from them."""
        for step in self.steps():
            if step > after:
                aside = self._path(step).with_name(f"undone-{self._path(step).name}")
                remove_folder(aside)
                self._path(step).rename(aside)

    def write(self, step: int, *, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Copy a state of nested dicts with tensors, and start to write it and plain facts.

        Waits for the previous checkpoint, and raises what its writer raised.
        """
        self.wait()
        tensors, rest = apart(state)
        tensors = copied(tensors)  # training changes them while the thread writes
        # A daemon, because with several processes it may wait for one that no longer exists.
        work = threading.Thread(
            target=self._write, args=(step, tensors, rest, dict(facts)), daemon=True
        )
        work.name = f"checkpoint-{step}"
        self._writer = work
        work.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk; StoreError if it cannot be written."""
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
        """Raise the error of the background writer, if any."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self) -> None:
        """Wait for the writer without raising its error."""
        if self._writer is not None:
            # With several processes, the writer may wait for one that no longer exists.
            self._writer.join(WRITE_SECONDS if self._world.size == 1 else 10.0)

    def read(
        self, step: int, *, like: Mapping[str, Tensor] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state and the facts of a checkpoint.

        Tensors are sharded as those of the same path in `like`. Raises JobError if the checkpoint
        is damaged.
        """
        path = self._path(step)
        try:
            # `weights_only`, because unpickling a folder from elsewhere would run its code.
            rest = torch.load(path / _REST, map_location="cpu", weights_only=True)
            tensors = checkpoint_io.fetch(path, like or {}, self._group)
            return together(tensors, rest), json.loads((path / _FACTS).read_text())
        except BaseException as error:  # torch's CheckpointException is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            message = f"{type(error).__name__}: {checkpoint_io.reason(error)}"
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
                checkpoint_io.store(tensors, partial_of(self._path(step)), self._group)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for this thread
            self._error = error

    def _write_first(
        self, step: int, tensors: dict[str, Tensor], rest: Any, facts: dict[str, Any]
    ) -> None:
        """Write the unsharded state next to the shards, then rename the folder."""

        def fill(partial: Path) -> None:
            torch.save(rest, partial / _REST)
            (partial / _FACTS).write_text(json.dumps(facts))
            for name in (_REST, _FACTS):
                sync(partial / name)
            checkpoint_io.store(tensors, partial, self._group)

        replace_folder(self._path(step), fill, durable=True)
        self._tidy()  # only now: older ones stay until the new one is on the disk

    def _tidy(self) -> None:
        """Remove the checkpoints that `keep` does not name."""
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
        """Return the newest of the steps with the best metric; None if no metric is configured."""
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
