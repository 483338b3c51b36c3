"""The trackers and the warnings that `run`, `explore` and `train` print at their end."""

import sys
from typing import TYPE_CHECKING

from ...store import Store
from ...store.errors import shorten
from .app import heavy
from .tables import counted

if TYPE_CHECKING:
    from ..config import RunConfig


def print_trackers(lake: "Store", settings: "RunConfig") -> None:
    """Print on stderr which trackers receive the run's metrics, and where they write."""
    if settings.trackers:
        for name, place in heavy("runs.tracking").places(lake, settings):
            print(f"tracker {name}: {place}", file=sys.stderr, flush=True)


def warn_of_dropped(lake: "Store", run: str) -> None:
    """Warn on stderr when most rollouts of the run were dropped."""
    [(rollouts, dropped, reason)] = lake.sql(
        "SELECT count(*), count(drop_reason), mode(drop_reason) FROM experiences "
        f"WHERE run_id = '{run}'"
    ).fetchall()
    if 2 * dropped > rollouts:
        print(
            f"warning: {dropped} of {rollouts} rollouts were dropped and taught nothing; "
            f"the most frequent reason: {shorten(' '.join(reason.split()), 200)}",
            file=sys.stderr,
        )


def warn_of_untrained(lake: "Store", run: str) -> None:
    """Warn on stderr about rows that could not be trained on, and steps without any."""
    [(rows, reason)] = lake.sql(
        "SELECT count(DISTINCT experience_id), mode(error) FROM operator_errors "
        f"WHERE operator = 'train' AND starts_with(lineage_id, '{run}/')"
    ).fetchall()
    [(skipped,)] = lake.sql(
        "SELECT count(*) FROM metrics_current "
        f"WHERE run_id = '{run}' AND name = 'train/skipped' AND value > 0"
    ).fetchall()
    if rows:
        print(
            f"warning: {counted(rows, 'row')} could not be trained on (see `operator_errors`); the "
            f"most frequent reason: {reason}",
            file=sys.stderr,
        )
    if skipped:
        print(
            f"warning: {counted(skipped, 'step')} had nothing to train on and changed no weights",
            file=sys.stderr,
        )
