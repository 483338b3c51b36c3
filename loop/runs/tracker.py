"""The protocol of an experiment tracker."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Tracked:
    """The job that a tracker shows; each job of a run has its own."""

    run_id: str
    job: str
    """explore, train or evaluate."""
    key: str
    """A key that is the same for all attempts at the job, and unique across stores."""
    attempt: int
    start_step: int | None
    """What the tracker has of this step and later ones belongs to a superseded attempt.

    None in evaluations, which supersede nothing.
    """
    folder: Path
    """The run's folder."""
    config: Mapping[str, Any]
    """The resolved configuration."""

    @property
    def name(self) -> str:
        """The run's name and the job's."""
        return f"{self.run_id}/{self.job}"


class Tracker(Protocol):
    """The methods of a tracker, which one thread calls one after the other.

    A call that raises is repeated later. A tracker may also have `place(run) -> str`, which returns
    where it will write, and `fail(error)`, which is called before `close` if the job failed.
    """

    def start(self, run: Tracked) -> object:
        """Start a job, or continue one that an earlier attempt started."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> object:
        """Log the metrics of a step; the same step may be logged several times."""
        ...

    def close(self) -> object:
        """Write what is buffered, and end."""
        ...
