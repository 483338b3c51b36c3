"""Curves over training steps, read from the metrics of runs."""

from collections.abc import Iterable, Sequence
from typing import Any

from ...store import Store
from ...store.query import is_in, literal

Points = Sequence[tuple[float, float]]
RATIOS = {
    "explore/tokens_per_row": ("explore/sampled_tokens", "explore/rows"),
    "train/tokens_per_row": ("train/tokens", "train/rows"),
}
"""Metrics that are made of two: a sum over the rows of a step, and the number of these rows."""
CURVES = {
    "train/reward_mean": "Reward of the rows trained on",
    "explore/reward_mean": "Reward of the rollouts sampled",
    "eval/accuracy": "Accuracy on held-out tasks",
    "eval/reward_mean": "Reward on held-out tasks",
    "eval/loss": "Loss on held-out rows",
    "train/loss": "Loss",
    "train/accuracy": "Pairs ranked correctly",
    "train/reward_margin": "Margin between chosen and rejected",
    "train/kl": "KL divergence from the reference",
    "train/entropy": "Entropy of the policy, nats a token",
    "train/clip_fraction": "Share of tokens clipped",
    "train/grad_norm": "Norm of the gradient",
    "train/lag_mean": "Lag of the rows, steps",
    "explore/tokens_per_row": "Tokens sampled a rollout",
}
"""The metrics that tell how a run went, and what their curves are called."""
POINTS = 500
"""Most points of a curve; a longer one has the means of neighbors."""


def curves_sql(run_ids: Sequence[str], names: Sequence[str]) -> str:
    """Return the SELECT of metric, run, step and value of these metrics, those of RATIOS too.

    A curve has at most `POINTS` rows.
    """
    wanted = [name for name in names if name not in RATIOS]
    ratios = {name: RATIOS[name] for name in names if name in RATIOS}
    read = dict.fromkeys([*wanted, *(part for parts in ratios.values() for part in parts)])
    made = "".join(
        f"""
    UNION ALL
    SELECT {literal(name)}, run_id, step, max(value) FILTER (name = {literal(total)})
        / nullif(max(value) FILTER (name = {literal(rows)}), 0)
    FROM read GROUP BY run_id, step"""
        for name, (total, rows) in ratios.items()
    )
    return f"""
WITH read AS MATERIALIZED (
    SELECT name, run_id, step, value FROM metrics_current
    WHERE {is_in("run_id", run_ids)} AND {is_in("name", read)}),
named AS (
    SELECT * FROM read WHERE {is_in("name", wanted)}{made}),
placed AS (
    SELECT *, step * {POINTS} // (1 + max(step) OVER (PARTITION BY run_id, name)) AS place
    FROM named WHERE value IS NOT NULL)
SELECT name, run_id, avg(step) AS step, avg(value) AS value FROM placed
GROUP BY name, run_id, place ORDER BY name, run_id, place""".strip()


def by_metric(
    rows: Iterable[Sequence[Any]], names: Iterable[str]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return rows of `curves_sql` as curves by metric and run, in the order of the names."""
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in names}
    for name, run_id, step, value in rows:
        curves[name].setdefault(run_id, []).append((step, value))
    return {name: of_runs for name, of_runs in curves.items() if of_runs}


def read(store: Store, run_ids: Sequence[str]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the curves of runs, by metric and run: at most 500 points each."""
    return by_metric(store.sql(curves_sql(run_ids, list(CURVES))).fetchall(), CURVES)
