"""Rows to imitate: the best of a group, those that rejection sampling accepts, and KTO's labels."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import polars as pl

from ..store.errors import OperatorError
from .body import Declared
from .comparable_rows import ASIDE, REWARD, DistinctBy, columns, with_aside
from .decorator import operator
from .scope import UNIT, Unit, seen
from .seeded_random import chance
from .statistics import GROUP, centered, reward

_MARKED = pl.Schema({"keep": pl.Boolean, "reason": pl.String})


@operator("filter")
def best_of_n(
    *,
    n: int = 1,
    min_reward: float | None = None,
    within: Unit = "group",
    distinct_by: DistinctBy | None = "messages",
    last_step: bool = False,
) -> Declared:
    """Keep the `n` best rows of each group (or `within` a task, of each task), to be imitated.

    Rows without a reward, or with one below `min_reward`, are never kept. Equal replies count once;
    `distinct_by` and `last_step` are as in `pairs`. Of equal rewards the first ids are kept.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "task_id": "t", "group_id": "g",
    ...                      "reward": [1.0, 0.0, 1.0], "response_text": ["4", "5", "four"]})
    >>> kept, dropped = best_of_n(distinct_by="response_text").split(rows)
    >>> kept["experience_id"].to_list(), dropped["reason"].to_list()
    (['a'], ['not among the best 1 of its group', 'not among the best 1 of its group'])
    """
    _at_least_one(n=n)
    unit = UNIT[within]

    def mark(frame: pl.LazyFrame) -> pl.LazyFrame:
        names = frame.collect_schema().names()
        rows = with_aside(frame, unit=unit, distinct_by=distinct_by, last_step=last_step)
        if min_reward is not None:
            low = pl.when(min_reward > REWARD).then(pl.lit(f"its reward is below {min_reward:g}"))
            rows = rows.with_columns(pl.coalesce(ASIDE, low).alias(ASIDE))
        counts = pl.col(ASIDE).is_null()
        order = pl.struct(~counts, -REWARD, "experience_id").rank("ordinal").over(unit)
        kept = counts & (order <= n)
        rest = pl.coalesce(ASIDE, pl.lit(f"not among the best {n} of its {within}"))
        return rows.with_columns(keep=kept, reason=rest).select(*names, "keep", "reason")

    reads = columns(distinct_by, last_step=last_step)
    return Declared(body=mark, reads=reads, scope=seen(within))


@operator("filter")
def rejection_sample(
    *,
    n: int = 8,
    beta: float = 0.5,
    within: Unit = "group",
    distinct_by: DistinctBy | None = "messages",
    last_step: bool = False,
    seed: int = 0,
) -> Declared:
    """Keep up to `n` rows of each group by statistical rejection sampling (RSO, arXiv:2309.06657).

    Its algorithm 1: round by round, each row that is left is accepted with probability
    exp((reward - max) / beta), where max is the largest reward left, until `n` are accepted. What
    is accepted is distributed as if the policy that is best under a KL penalty of weight `beta` had
    written it: a small `beta` keeps the best rows, a large one any. Put `pairs` behind it for the
    pairs of RSO.

    Chance follows from `seed`, the round and the row's id, so that the same rows give the same
    result. `within`, `distinct_by` and `last_step` are as in `pairs`; rows without a reward are
    never kept.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "task_id": "t", "group_id": "g",
    ...                      "reward": [1.0, 0.0, 0.9], "response_text": ["4", "5", "four"]})
    >>> kept, dropped = rejection_sample(n=2, beta=0.1, distinct_by="response_text").split(rows)
    >>> kept["experience_id"].to_list(), dropped["reason"].to_list()
    (['a', 'c'], ['rejection sampling had accepted 2 of its group before it'])
    """
    _at_least_one(n=n)
    if not (beta > 0 and math.isfinite(beta)):
        raise OperatorError(f"`beta` must be above 0, got {beta}")
    unit = UNIT[within]
    late = f"rejection sampling had accepted {n} of its {within} before it"

    def accept(rows: pl.DataFrame) -> pl.DataFrame:
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
        return rows.map_batches(accept, schema={**frame.collect_schema(), **_MARKED})

    reads = columns(distinct_by, last_step=last_step)
    return Declared(body=mark, reads=reads, scope=seen(within))


def accepted(
    ids: Sequence[str], rewards: Sequence[float], *, n: int, beta: float, seed: int
) -> Iterator[str]:
    """Yield the ids that algorithm 1 of RSO accepts, in the order in which it does.

    Rows are asked in an order by chance, so that the ids favour none of them. Each round accepts
    its best row at least, so there are as many rounds as rows at most.

    >>> list(accepted(["a", "b"], [0.0, 1.0], n=1, beta=0.01, seed=0))
    ['b']
    """
    candidates = zip(ids, rewards, strict=True)
    left = dict(sorted(candidates, key=lambda one: chance(seed, one[0])))
    round_, done = 0, 0
    while left and done < n:
        best = max(left.values())
        for name, worth in list(left.items()):
            if chance(seed, round_, name) >= math.exp((worth - best) / beta):
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
    ratio: float = 1.0,
) -> Declared:
    """Set `desirable`, the label of KTO (arXiv:2402.01306), and `desirable_weight`, to balance it.

    By `threshold`, a row is desirable when its reward is above `above`; by `group_mean`, when it is
    above the mean of its group's rewards, and a row at the mean is neither: NULL, as is one whose
    reward is NULL or no finite number. The weights are one number for each class, the smaller of
    which is 1, so that the desirable rows together weigh `ratio` times what the undesirable ones
    do; the paper asks for a ratio from 1 to 4/3. They are TRL's `desirable_weight` and
    `undesirable_weight`.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "group_id": "g",
    ...                      "reward": [1.0, 0.0, 0.0]})
    >>> rows.pipe(kto_labels()).select("desirable", "desirable_weight").rows()
    [(True, 2.0), (False, 1.0), (False, 1.0)]
    """
    if not (ratio > 0 and math.isfinite(ratio)):
        raise OperatorError(f"`ratio` must be above 0, got {ratio}")

    def label(frame: pl.LazyFrame) -> pl.LazyFrame:
        gain = centered(reward, GROUP) if by == "group_mean" else reward - above
        verdict = pl.when(gain != 0).then(gain > 0) if by == "group_mean" else gain > 0
        labelled = frame.with_columns(desirable=verdict)
        good, bad = pl.col("desirable").sum(), (~pl.col("desirable")).sum()
        # of none in a class there is nothing to balance
        share = pl.when((good > 0) & (bad > 0)).then(ratio * bad / good).otherwise(1.0)
        of_good, of_bad = pl.max_horizontal(share, 1.0), pl.max_horizontal(1 / share, 1.0)
        weight = pl.when("desirable").then(of_good).when(~pl.col("desirable")).then(of_bad)
        return labelled.with_columns(desirable_weight=weight)

    reads = ("reward", "group_id") if by == "group_mean" else ("reward",)
    return Declared(body=label, reads=reads, scope="all")


def _at_least_one(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise OperatorError(f"`{name}` must be 1 or more, got {number}")
