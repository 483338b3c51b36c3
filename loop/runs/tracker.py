"""The protocol of an experiment tracker."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Tracked:
    """The job that a tracker shows: one of its own for each job of a run."""

    run_id: str
    job: str
    """explore, train or evaluate."""
    key: str
    """The same for all attempts at the job, and no other's: of another store neither."""
    attempt: int
    start_step: int | None
    """What the tracker has of this step and later ones belongs to a superseded attempt.

    None: nothing does, as in an evaluation.
    """
    folder: Path
    """Where the run keeps its files."""
    config: Mapping[str, Any]
    """The resolved configuration."""

    @property
    def name(self) -> str:
        """The run's name and the job's."""
        return f"{self.run_id}/{self.job}"


class Monitor(Protocol):
    """What a tracker must have; called in one thread, one call after the other.

    A call that raises is made again, later. It may have `place(run) -> str`, which says where it
    will write, and `fail(error)`, which is called before `close` when the job failed.
    """

    def start(self, run: Tracked) -> object:
        """Begin to show a job, or go on with it when it was begun by an attempt before."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> object:
        """Take the numbers of a step; the same step may come again, with others."""
        ...

    def close(self) -> object:
        """Write what is still held, and end."""
        ...
