"""Progress of jobs on stderr: bars on a terminal, else a line every few seconds."""

import sys
from collections.abc import Mapping
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from ..config import RunConfig

LINE_SECONDS = 5.0
"""Seconds between two lines of a job without a terminal."""
_SHOWN = {
    "explore": {"explore/reward_mean": "reward", "explore/seconds": "seconds"},
    "train": {
        "train/reward_mean": "reward",
        "train/accuracy": "accuracy",
        "train/reward_margin": "margin",
        "train/loss": "loss",
        "train/lag_mean": "lag",
    },
    "evaluate": {
        "eval/accuracy": "accuracy",
        "eval/reward_mean": "reward",
        "eval/loss": "held-out loss",
    },
}


class Display:
    """Shows the progress of a run's jobs; it is their listener."""

    def __init__(self, config: RunConfig, *, total_steps: int | None, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._live = self._console.is_terminal and not quiet
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
            disable=not self._live,
        )
        self._name = config.name
        self._bars: dict[str, TaskID] = {}
        self._total = total_steps
        self._said: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, job: str, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step and the metrics of a job."""
        shown = {name: label for name, label in _SHOWN[job].items() if name in metrics}
        if "train/accuracy" in shown:  # the reward of stored pairs says nothing of the policy
            shown.pop("train/reward_mean", None)
        numbers = "  ".join(f"{label} {metrics[name]:.4g}" for name, label in shown.items())
        if job == "evaluate":
            self._console.print(f"[bold]{self._name}[/] step {step}: {numbers}", highlight=False)
        elif self._live:
            if job not in self._bars:
                self._bars[job] = self._progress.add_task(job, total=self._total, numbers="")
            self._progress.update(self._bars[job], completed=step, numbers=numbers)
        elif step == self._total or monotonic() - self._said.get(job, 0.0) >= LINE_SECONDS:
            self._said[job] = monotonic()
            of = f"/{self._total}" if self._total else ""
            self._console.print(f"{self._name} {job} {step}{of}  {numbers}", highlight=False)
            sys.stderr.flush()
