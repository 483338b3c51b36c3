"""What `run`, `explore` and `train` print when they end."""

import sys
from typing import TYPE_CHECKING, Any

from .lazy import heavy
from .tables import counted, print_fields, print_json

if TYPE_CHECKING:
    from ...store import Store
    from ..config import RunConfig


def tell_monitors(lake: "Store", settings: "RunConfig") -> None:
    """Say on stderr which trackers are told the run's metrics, and where they write."""
    if settings.trackers:
        for name, place in heavy("runs.tracking").places(lake, settings):
            print(f"monitor {name}: {place}", file=sys.stderr, flush=True)


def summary(lake: "Store", settings: "RunConfig") -> dict[str, Any]:
    """Return what a run came to, as its store says."""
    [(steps, rows, reward)] = lake.sql(
        "SELECT count(*), (SELECT count(*) FROM draws_current "
        f"WHERE run_id = '{settings.name}' AND weight > 0), arg_max(reward_mean, step) "
        f"FROM steps WHERE run_id = '{settings.name}'"
    ).fetchall()
    [(loss, version)] = lake.sql(
        "SELECT (SELECT arg_max(value, step) FROM metrics_current "
        f"WHERE run_id = '{settings.name}' AND name = 'train/loss'), "
        f"(SELECT max(policy_version) FROM policies_current WHERE run_id = '{settings.name}')"
    ).fetchall()
    return {
        "run": settings.name,
        "steps": steps,
        "rows_trained": rows,
        "final_reward": reward,
        "final_loss": loss,
        **_unused(lake, settings.name),
        **_held_out(lake, settings.name),
        "policy_version": version,
        "store": lake.uri,
    }


def _unused(lake: "Store", run: str) -> dict[str, int]:
    """Return how many tries of the run were dropped, or never scored, when there are any."""
    [(dropped, unscored)] = lake.sql(
        "SELECT count(drop_reason), count(*) FILTER (drop_reason IS NULL AND reward IS NULL) "
        f"FROM experiences WHERE run_id = '{run}'"
    ).fetchall()
    counts = {"rows_dropped": dropped, "rows_unscored": unscored}
    return {name: count for name, count in counts.items() if count}


def warn_of_dropped(lake: "Store", run: str) -> None:
    """Say on stderr when most tries of the run taught nothing."""
    [(tries, dropped, reason)] = lake.sql(
        "SELECT count(*), count(drop_reason), mode(drop_reason) FROM experiences "
        f"WHERE run_id = '{run}'"
    ).fetchall()
    if 2 * dropped > tries:
        print(
            f"warning: {dropped} of {tries} tries were dropped, and nothing was learned from them; "
            f"the most frequent reason: {' '.join(reason.split())[:200]}",
            file=sys.stderr,
        )


def warn_of_untrained(lake: "Store", run: str) -> None:
    """Say on stderr which rows the model could not take, and how many steps changed nothing."""
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
            f"warning: {counted(skipped, 'step')} had nothing to train on, and changed no weight",
            file=sys.stderr,
        )


def _held_out(lake: "Store", run: str) -> dict[str, float]:
    """Return loss, accuracy and reward on what is held out, before and after, where measured."""
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


def tell(values: dict[str, Any], *, as_json: bool) -> None:
    """Print what a job came to."""
    if as_json:
        print_json(values)
    else:
        print_fields(values)
