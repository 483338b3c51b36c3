"""Whether the rows that a run was trained on are those that it sampled.

Shows which kinds of rows were trained on more or less often than others, and what removed them. It
cannot show whether that is wrong: a filter that removes long rows is often meant to.
"""

from dataclasses import dataclass
from typing import Any

import polars as pl

from ...store import Store
from ...store.query import literal
from .clustered import ALPHA, by_bin, p_value
from .history import LENGTH, named, of_run, quintiles, share

DIMENSIONS = ("length", "difficulty", "taskset", "lag", "finish_reason", "source", "engine")
"""What rows are compared by."""
LEAST = 0.1
"""Smaller relative differences are no findings, however sure they are."""
LEAST_LAG = 1.0
"""Smaller differences of the mean lag are no findings, in steps."""
_SAME = ("lag", "drawn_lag")
"""What is not compared: one lag differs with the other."""
_DIFFICULTY = """
    CASE WHEN pass_rate IS NULL THEN '(none)'
         WHEN pass_rate = 0 THEN '0' WHEN pass_rate = 1 THEN '1' WHEN pass_rate < 0.25 THEN '0-0.25'
         WHEN pass_rate < 0.5 THEN '0.25-0.5'
         WHEN pass_rate < 0.75 THEN '0.5-0.75' ELSE '0.75-1' END"""
"""SQL of a task's difficulty: its pass rate in the run, in bins."""


@dataclass(frozen=True, kw_only=True)
class Bias:
    """How the rows that a run was trained on differ from those that it sampled."""

    run_id: str
    num_rows: int
    """Rows that the run sampled to train on, and whose fate is settled."""
    num_waiting: int
    """Rows of the last batches that may still be drawn; they are not compared."""
    num_foreign: int
    """Draws of rows that the run did not sample: imported, or of another run."""
    outcomes: list[dict[str, Any]]
    """What became of the settled rows, with the reason: rows, share, length and reward."""
    bins: list[dict[str, Any]]
    """A row a bin of a dimension: `trained`, the draws that trained a row, with its interval,
    `rest`, the same in other bins, and `lag`, the mean lag of those draws."""
    findings: list[str]
    """Differences beyond chance, a sentence each; empty when there is none."""
    facts: list[str]
    """What else a reader should know, such as what truncation did."""


def bias(store: Store, run_id: str) -> Bias:
    """Compare the rows that a run was trained on with those that it sampled.

    Rows are compared by length, difficulty (the task's pass rate), taskset, lag when stored, finish
    reason, source and engine. Intervals are 95 %, with the rows of a group as one cluster. A
    difference is a finding when its score test has p < 0.001 after Bonferroni's correction over all
    bins, and it is at least 10 % of the larger of both rates.

    Raises NotFoundError for an unknown run, JobError for one without steps.
    """
    now = of_run(store, run_id)
    rows = _rows(now, run_id)
    settled = _settled(rows)
    # all tests first: the correction counts them
    tests = [
        (dimension, value, by_bin(part, dimension, value, cluster="group_id"))
        for dimension in DIMENSIONS
        for value, part in (("trained", settled), ("drawn_lag", _drawn(settled)))
        if part.height and part[dimension].n_unique() > 1 and (dimension, value) != _SAME
    ]
    number = sum(found.height for _, _, found in tests)
    lags = {d: found for d, value, found in tests if value == "drawn_lag"}
    bins: list[dict[str, Any]] = []
    findings: list[str] = []
    for dimension, value, found in tests:
        for row in found.iter_rows(named=True):
            p = min(1.0, p_value(row["z"]) * number)
            if value == "trained":
                bins.append(_bin(dimension, row, p, lags.get(dimension)))
            if p >= ALPHA:
                continue
            if value == "drawn_lag" and abs(row["mean"] - row["rest"]) >= LEAST_LAG:
                findings.append(_of_lag(dimension, row, p))
            if value == "trained" and _differs(row["mean"], row["rest"]):
                findings.append(_sentence(settled, dimension, row, p))
    foreign = now.sql(
        f"SELECT count(*) FROM draws_current d JOIN experiences e USING (experience_id) WHERE "
        f"d.run_id = {literal(run_id)} AND e.run_id IS DISTINCT FROM d.run_id"
    ).fetchall()[0][0]
    return Bias(
        run_id=run_id,
        num_rows=settled.height,
        num_waiting=rows.height - settled.height,
        num_foreign=foreign,
        outcomes=_outcomes(settled),
        bins=bins,
        findings=findings,
        facts=_facts(settled) if rows.height else [f"the run sampled no row: it drew {foreign:,}"],
    )


def _rows(store: Store, run_id: str) -> pl.DataFrame:
    """Return the rows that a run sampled to train on, and what became of each."""
    name = literal(run_id)
    found = store.sql(
        f"""
        WITH published AS (
            SELECT created_at, max(policy_version) AS version FROM policies_current
            WHERE run_id = {name} GROUP BY created_at),
        passed AS (SELECT task_id, pass_rate FROM task_pass_rates WHERE run_id = {name})
        SELECT e.group_id, coalesce(e.batch, 0) AS batch, e.source, e.engine, e.finish_reason,
               e.reward, t.taskset, {_DIFFICULTY} AS difficulty, {LENGTH} AS length,
               greatest(published.version - e.policy_version, 0) AS lag,
               o.num_trained AS trained, o.lag AS drawn_lag, o.outcome
        FROM experiences_current e ASOF LEFT JOIN published ON e.created_at >= published.created_at
        JOIN outcomes o USING (experience_id)
        LEFT JOIN tasks t USING (task_id) LEFT JOIN passed USING (task_id)
        WHERE e.run_id = {name} AND o.run_id = {name}
        """
    ).pl()
    return found.with_columns(
        *(named(column) for column in ("source", "engine", "finish_reason", "taskset", "lag")),
        num_tokens="length",
        length=quintiles(found["length"]),
    )


def _settled(rows: pl.DataFrame) -> pl.DataFrame:
    """Leave out the batches that still wait: which of their rows come first says nothing."""
    # whole batches: in a stream, the rows of a batch that end early are drawn first
    waiting = rows.filter(pl.col("outcome") == "waiting")["batch"].unique()
    return rows.filter(~pl.col("batch").is_in(waiting.implode()))


def _drawn(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("drawn_lag").is_not_null())


def _differs(one: float, other: float) -> bool:
    return abs(one - other) >= LEAST * max(one, other)


def _bin(
    dimension: str, row: dict[str, Any], p: float, lags: pl.DataFrame | None
) -> dict[str, Any]:
    lag = None
    if lags is not None:
        lag = next(iter(lags.filter(pl.col(dimension) == row[dimension])["mean"]), None)
    return {
        "dimension": dimension,
        "bin": row[dimension],
        "rows": row["num_rows"],
        "trained": row["mean"],
        "low": row["low"],
        "high": row["high"],
        "rest": row["rest"],
        "lag": lag,
        "p": p,
    }


def _sentence(rows: pl.DataFrame, dimension: str, row: dict[str, Any], p: float) -> str:
    """Say how a bin differs, and what removed most of its rows."""
    own = rows.filter((pl.col(dimension) == row[dimension]) & (pl.col("trained") == 0))
    more = "more" if row["mean"] > row["rest"] else "less"
    text = (
        f"{dimension} {row[dimension]}: trained on {more} than other rows, {row['mean']:.2f} times "
        f"a row (95 %: {row['low']:.2f} to {row['high']:.2f}) against {row['rest']:.2f} "
        f"(p {_p(p)}, {row['num_rows']:,} rows)"
    )
    # what removed rows explains only why they were trained on less
    if more == "more" or not own.height:
        return text
    reason, count = own["outcome"].value_counts(sort=True).row(0)
    return f"{text}; of those left out, {share(count / own.height)} are {reason}"


def _of_lag(dimension: str, row: dict[str, Any], p: float) -> str:
    return (
        f"{dimension} {row[dimension]}: trained at a mean lag of {row['mean']:.1f} steps (95 %: "
        f"{row['low']:.1f} to {row['high']:.1f}), other rows at {row['rest']:.1f} (p {_p(p)})"
    )


def _p(p: float) -> str:
    return "< 1e-6" if p < 1e-6 else f"= {p:.1g}"


def _outcomes(rows: pl.DataFrame) -> list[dict[str, Any]]:
    found = rows.group_by("outcome").agg(
        rows=pl.len(),
        share=pl.len() / max(rows.height, 1),
        length=pl.col("num_tokens").mean(),
        reward=pl.col("reward").mean(),
    )
    return found.sort("rows", "outcome", descending=[True, False]).to_dicts()


def _facts(rows: pl.DataFrame) -> list[str]:
    """Say what filters and freshness removed, and what truncation did."""
    if not rows.height:
        return ["all rows of the run still wait to be drawn"]
    made = [
        f"{share(row['share'])} of {rows.height:,} sampled rows: {row['outcome']}"
        for row in _outcomes(rows)
    ]
    cut = rows.filter(pl.col("finish_reason") == "length")
    whole = rows.filter(pl.col("finish_reason") != "length")
    if cut.height and whole.height:
        lost = cut.filter(pl.col("trained") == 0).height / cut.height
        rewards = [part["reward"].mean() for part in (cut, whole)]
        of = ["unknown" if mean is None else f"{mean:.3f}" for mean in rewards]
        made.append(
            f"{share(cut.height / rows.height)} of the rows were cut at the token limit: mean "
            f"reward {of[0]} against {of[1]} of whole ones, and {share(lost)} of them were not "
            "trained on"
        )
    return made
