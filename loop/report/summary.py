"""The results of a run, from its store: what `rlake run` prints at its end."""

from typing import Any

from ...store import Store
from ...store.query import literal


def summary(store: Store, run_id: str) -> dict[str, Any]:
    """Return a run's results from its store."""
    [(steps, rows, reward)] = store.sql(
        "SELECT count(*), (SELECT count(*) FROM draws_current "
        f"WHERE run_id = {literal(run_id)} AND weight > 0), arg_max(reward_mean, step) "
        f"FROM steps WHERE run_id = {literal(run_id)}"
    ).fetchall()
    # the reward of stored pairs says nothing of the policy
    of_pairs = {"accuracy": "train/accuracy", "margin": "train/reward_margin"}
    last = dict(
        store.sql(
            "SELECT name, arg_max(value, step) FROM metrics_current WHERE run_id = "
            f"{literal(run_id)} AND name IN {('train/loss', *of_pairs.values())} GROUP BY name"
        ).fetchall()
    )
    [(version,)] = store.sql(
        f"SELECT max(policy_version) FROM policies_current WHERE run_id = {literal(run_id)}"
    ).fetchall()
    # pairs have an accuracy and a margin in place of a reward
    results = {f"final_{k}": last[name] for k, name in of_pairs.items() if name in last}
    return {
        "run": run_id,
        "steps": steps,
        "rows_trained": rows,
        **(results or {"final_reward": reward}),
        "final_loss": last.get("train/loss"),
        **_unused(store, run_id),
        **_held_out(store, run_id),
        "policy_version": version,
        "store": store.uri,
    }


def _unused(store: Store, run_id: str) -> dict[str, int]:
    [(dropped, unscored)] = store.sql(
        "SELECT count(drop_reason), count(*) FILTER (drop_reason IS NULL AND reward IS NULL) "
        f"FROM experiences WHERE run_id = {literal(run_id)}"
    ).fetchall()
    counts = {"rows_dropped": dropped, "rows_unscored": unscored}
    return {name: count for name, count in counts.items() if count}


def _held_out(store: Store, run_id: str) -> dict[str, float]:
    """Return held-out loss, accuracy and reward, before and after, where they were measured."""
    found = store.sql(
        "SELECT replace(name[6:], '_mean', ''), arg_min(value, step), arg_max(value, step), "
        "min(step), max(step) "
        f"FROM metrics_current WHERE run_id = {literal(run_id)} AND (name = 'eval/loss' "
        "OR job = 'evaluate' AND name IN ('eval/accuracy', 'eval/reward_mean')) "
        "GROUP BY name ORDER BY name DESC"
    ).fetchall()
    values: dict[str, float] = {}
    for name, before, after, first, last in found:
        # of one measurement, the step says which of both it is
        if first < last or first == 0:
            values[f"held_out_{name}_before"] = before
        if first < last or first > 0:
            values[f"held_out_{name}_after"] = after
    return values
