"""Rows to imitate: those that rejection sampling accepts, and KTO's labels."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import polars as pl

from .body import Declared
from .comparable_rows import ASIDE, REWARD, DistinctBy, columns, with_aside
from .decorator import operator
from .kinds import MARKS
from .parameters import Count, Positive
from .scope import UNIT, Unit, seen
from .statistics import GROUP, centered, reward, seeded_uniform


@operator("filter")
def rejection_sample(
    *,
    n: Count = 8,
    beta: Positive = 0.5,
    within: Unit = "group",
    distinct_by: DistinctBy | None = "messages",
    last_step: bool = False,
    seed: int = 0,
) -> Declared:
    """Keep up to `n` rows of each group by statistical rejection sampling (RSO, arXiv:2309.06657).

    Algorithm 1 of the paper: in each round, every remaining row is accepted with probability
    exp((reward - max) / beta), where max is the largest remaining reward, until `n` are accepted.
    Accepted rows are distributed as samples of the optimal policy under a KL penalty of weight
    `beta`: a small `beta` keeps the best rows, a large one any rows. Add `pairs` after it for the
    pairs of RSO.

    The random numbers follow from `seed`, the round and the row's id, so the same rows give the
    same result. `within`, `distinct_by` and `last_step` are as in `pairs`; rows without a reward
    are never kept.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "task_id": "t", "group_id": "g",
    ...                      "reward": [1.0, 0.0, 0.9], "response_text": ["4", "5", "four"]})
    >>> kept, dropped = rejection_sample(n=2, beta=0.1, distinct_by="response_text").split(rows)
    >>> kept["experience_id"].to_list(), dropped["reason"].to_list()
    (['a', 'c'], ['rejection sampling had accepted 2 of its group before it'])
    """
    unit = UNIT[within]
    late = f"rejection sampling had accepted {n} of its {within} before it"

    def accept(rows: pl.DataFrame) -> pl.DataFrame:
        # Sorted, so that the order in which rows were read does not choose the demonstration.
        counted = rows.filter(pl.col(ASIDE).is_null()).sort(unit, "experience_id")
        grouped = counted.group_by(unit, maintain_order=True).agg("experience_id", REWARD)
        kept = [
            name
            for _, ids, rewards in grouped.rows()
            for name in accepted(ids, rewards, n=n, beta=beta, seed=seed)
        ]
        is_kept = pl.col("experience_id").is_in(pl.Series(kept, dtype=pl.String).implode())
        return rows.with_columns(keep=is_kept, reason=pl.coalesce(ASIDE, pl.lit(late))).drop(ASIDE)

    def mark(frame: pl.LazyFrame) -> pl.LazyFrame:
        rows = with_aside(frame, unit=unit, distinct_by=distinct_by, last_step=last_step)
        return rows.map_batches(accept, schema={**frame.collect_schema(), **MARKS})

    reads = columns(distinct_by, last_step=last_step)
    return Declared(body=mark, reads=reads, scope=seen(within))


def accepted(
    ids: Sequence[str], rewards: Sequence[float], *, n: int, beta: float, seed: int
) -> Iterator[str]:
    """Yield the ids that algorithm 1 of RSO accepts, in the order in which it accepts them.

    Rows are visited in random order, so that ids do not favor any of them. Each round accepts at
    least its best row, so there are at most as many rounds as rows.

    >>> list(accepted(["a", "b"], [0.0, 1.0], n=1, beta=0.01, seed=0))
    ['b']
    """
    candidates = zip(ids, rewards, strict=True)
    left = dict(sorted(candidates, key=lambda one: seeded_uniform(seed, one[0])))
    round_, done = 0, 0
    while left and done < n:
        best = max(left.values())
        for name, worth in list(left.items()):
            if seeded_uniform(seed, round_, name) >= math.exp((worth - best) / beta):
                continue
            del left[name]
            yield name
            done += 1
            if done == n:
                return
        round_ += 1


@operator("derive", writes=("desirable", "desirable_weight"))
def kto_labels(
    *,
    by: Literal["threshold", "group_mean"] = "threshold",
    above: float = 0.0,
    ratio: Positive = 1.0,
) -> Declared:
    """Set `desirable`, the label of KTO (arXiv:2402.01306), and `desirable_weight`, to balance it.

    By `threshold`, a row is desirable when its reward is above `above`; by `group_mean`, when it is
    above the mean of its group's rewards. A row at the mean, or without a finite reward, has the
    label NULL. Each class has one weight, the smaller of which is 1, so that the desirable rows
    together weigh `ratio` times as much as the undesirable ones; the paper recommends a ratio from
    1 to 4/3. They are TRL's `desirable_weight` and `undesirable_weight`.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "group_id": "g",
    ...                      "reward": [1.0, 0.0, 0.0]})
    >>> rows.pipe(kto_labels()).select("desirable", "desirable_weight").rows()
    [(True, 2.0), (False, 1.0), (False, 1.0)]
    """

    def label(frame: pl.LazyFrame) -> pl.LazyFrame:
        gain = centered(reward, GROUP) if by == "group_mean" else reward - above
        verdict = pl.when(gain != 0).then(gain > 0) if by == "group_mean" else gain > 0
        labeled = frame.with_columns(desirable=verdict)
        good, bad = pl.col("desirable").sum(), (~pl.col("desirable")).sum()
        # without rows in one of the classes there is nothing to balance
        share = pl.when((good > 0) & (bad > 0)).then(ratio * bad / good).otherwise(1.0)
        of_good, of_bad = pl.max_horizontal(share, 1.0), pl.max_horizontal(1 / share, 1.0)
        weight = pl.when("desirable").then(of_good).when(~pl.col("desirable")).then(of_bad)
        return labeled.with_columns(desirable_weight=weight)

    reads = ("reward", "group_id") if by == "group_mean" else ("reward",)
    return Declared(body=label, reads=reads, scope="all")
