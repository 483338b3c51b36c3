"""The summary and the warnings that `run`, `explore` and `train` print at their end."""

import sys
from typing import TYPE_CHECKING, Any

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


def summary(lake: "Store", settings: "RunConfig") -> dict[str, Any]:
    """Return a run's results from its store."""
    [(steps, rows, reward)] = lake.sql(
        "SELECT count(*), (SELECT count(*) FROM draws_current "
        f"WHERE run_id = '{settings.name}' AND weight > 0), arg_max(reward_mean, step) "
        f"FROM steps WHERE run_id = '{settings.name}'"
    ).fetchall()
    # the reward of stored pairs says nothing of the policy
    of_pairs = {"accuracy": "train/accuracy", "margin": "train/reward_margin"}
    last = dict(
        lake.sql(
            "SELECT name, arg_max(value, step) FROM metrics_current WHERE run_id = "
            f"'{settings.name}' AND name IN {('train/loss', *of_pairs.values())} GROUP BY name"
        ).fetchall()
    )
    [(version,)] = lake.sql(
        f"SELECT max(policy_version) FROM policies_current WHERE run_id = '{settings.name}'"
    ).fetchall()
    results = {f"final_{k}": last[name] for k, name in of_pairs.items() if name in last}
    return {
        "run": settings.name,
        "steps": steps,
        "rows_trained": rows,
        **(results or {"final_reward": reward}),
        "final_loss": last.get("train/loss"),
        **_unused(lake, settings.name),
        **_held_out(lake, settings.name),
        "policy_version": version,
        "store": lake.uri,
    }


def _unused(lake: "Store", run: str) -> dict[str, int]:
    [(dropped, unscored)] = lake.sql(
        "SELECT count(drop_reason), count(*) FILTER (drop_reason IS NULL AND reward IS NULL) "
        f"FROM experiences WHERE run_id = '{run}'"
    ).fetchall()
    counts = {"rows_dropped": dropped, "rows_unscored": unscored}
    return {name: count for name, count in counts.items() if count}


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


def _held_out(lake: "Store", run: str) -> dict[str, float]:
    """Return held-out loss, accuracy and reward, before and after, where they were measured."""
    found = lake.sql(
        "SELECT replace(name[6:], '_mean', ''), arg_min(value, step), arg_max(value, step) "
        f"FROM metrics_current WHERE run_id = '{run}' AND (name = 'eval/loss' "
        "OR job = 'evaluate' AND name IN ('eval/accuracy', 'eval/reward_mean')) "
        "GROUP BY name ORDER BY name DESC"
    ).fetchall()
    return {
        f"held_out_{name}_{when}": value
        for name, *both in found
        for when, value in zip(("before", "after"), both, strict=True)
    }
