"""Reward shaping: pass rates, penalties of length, and rewards made of several parts."""

import polars as pl

from ..store.errors import OperatorError
from .body import FrameFunction, Value, by_name
from .decorator import operator
from .parameters import Share
from .statistics import GROUP, finite, mean, reward, std
from .token_statistics import answer_logprobs

# A tool's replies and the prompt are no part of the answer's length: only what was sampled is.
_TRAINED = pl.col("loss_mask").list.sum()


@operator("derive", writes=("reward",))
def shape_reward(*, formula: str) -> Value:
    """Set `reward` to an SQL formula (DuckDB's dialect) over the row's columns.

    Parts of the reward and measurements are read by name: `rewards['accuracy']`,
    `metrics['seconds']`. NULL stays NULL: use `coalesce` where a part may be missing. A row whose
    reward comes out as NaN or infinity fails.

    >>> rows = pl.DataFrame({"experience_id": ["a"], "reward": [0.0],
    ...                      "rewards": [[{"name": "accuracy", "value": 1.0},
    ...                                   {"name": "format", "value": 0.5}]]})
    >>> shaped = shape_reward(formula="rewards['accuracy'] + 0.2 * rewards['format']")
    >>> rows.pipe(shaped)["reward"].to_list()
    [1.1]
    """
    value = f"({by_name(formula, what='formula')})::DOUBLE"
    refused = f"error('the reward is ' || ({value}) || ', expected a finite number or NULL')"
    return Value(f"CASE WHEN isfinite({value}) IS NOT false THEN {value} ELSE {refused} END")


@operator("derive", writes=("pass_rate",), whole_groups=True)
def pass_rate(*, accuracy: str = "reward", threshold: float = 0.5) -> Value:
    """Set `pass_rate` to the share of answers of the group whose accuracy is above `threshold`.

    `accuracy` is an SQL expression over the row. Where `reward` is shaped, name what is not:
    `rewards['accuracy']`. Answers of which it is NULL, or no finite number, do not count; a group
    without any has NULL.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "group_id": "g",
    ...                      "reward": [1.0, 0.0, None]})
    >>> rows.pipe(pass_rate())["pass_rate"].to_list()
    [0.5, 0.5, 0.5]
    """
    return Value(passing(accuracy, threshold))


def passing(accuracy: str, threshold: float) -> str:
    """Return the SQL of a group's pass rate."""
    value = f"({by_name(accuracy, what='accuracy')})::DOUBLE"
    # NaN is above all numbers, and would pass
    passed = f"CASE WHEN isfinite({value}) THEN ({value} > {threshold})::INT END"
    # a mean of zeros and ones is exact, in any order of rows
    return f"avg({passed}) OVER (PARTITION BY {GROUP})"


@operator("derive", whole_groups=True, writes=("group_mean", "group_std", "group_min", "group_max"))
def group_statistics(*, column: str = "reward") -> list[pl.Expr]:
    """Set mean, standard deviation (divisor n - 1), smallest and largest of a column in the group.

    Values that are NULL, NaN or infinite do not count.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "group_id": "g",
    ...                      "reward": [1.0, 0.0, None]})
    >>> rows.pipe(group_statistics()).select("group_mean", "group_min", "group_max").row(2)
    (0.5, 0.0, 1.0)
    """
    value = finite(column)
    return [
        mean(value, GROUP).alias("group_mean"),
        std(value, GROUP).alias("group_std"),
        value.min().over(GROUP).alias("group_min"),
        value.max().over(GROUP).alias("group_max"),
    ]


@operator("derive")
def overlong_penalty(*, max_tokens: int, cache: int) -> pl.Expr:
    """Set `overlong_penalty` to DAPO's soft punishment of length (arXiv:2503.14476, equation 13).

    0 for an answer of at most `max_tokens - cache` sampled tokens; from there on falling evenly to
    -1 at `max_tokens`; -1 beyond. NULL without a `loss_mask`. Add it to the reward with
    `shape_reward`.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "loss_mask": [[False, True], [True] * 9]})
    >>> rows.pipe(overlong_penalty(max_tokens=10, cache=4))["overlong_penalty"].to_list()
    [0.0, -0.75]
    """
    if not 0 < cache <= max_tokens:
        raise OperatorError(
            f"`cache` of `overlong_penalty` must be from 1 to `max_tokens` {max_tokens}, got "
            f"{cache}"
        )
    over = (max_tokens - cache - _TRAINED.cast(pl.Float64)) / cache
    return over.clip(-1.0, 0.0).alias("overlong_penalty")


@operator("derive", whole_groups=True)
def length_penalty(*, threshold: float = 0.5) -> pl.Expr:
    """Set `length_penalty` to the length reward of Kimi k1.5 (arXiv:2501.12599, section 2.3.3).

    From 0.5 for the shortest answer of the group to -0.5 for the longest, in sampled tokens; what
    is above 0 only for an answer that passes (its reward is above `threshold`). 0 where all are of
    one length, NULL where reward or length is.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "group_id": "g",
    ...                      "reward": [1.0, 0.0, 1.0],
    ...                      "loss_mask": [[True] * 2, [True] * 2, [True] * 4]})
    >>> rows.pipe(length_penalty())["length_penalty"].to_list()
    [0.5, 0.0, -0.5]
    """
    length = _TRAINED.cast(pl.Float64)
    low, high = length.min().over(GROUP), length.max().over(GROUP)
    share = pl.when(high > low).then(0.5 - (length - low) / (high - low)).otherwise(0.0)
    penalty = pl.when(reward > threshold).then(share).otherwise(pl.min_horizontal(share, 0.0))
    known = reward.is_not_null() & length.is_not_null()
    return pl.when(known).then(penalty).alias("length_penalty")


_LIKELIHOOD = "logprob_of_the_answer"


@operator(
    "derive",
    reads=("experience_id", "group_id", "reward", "logprobs", "loss_mask"),
    writes=("reward",),
    whole_groups=True,
)
def unlikeliness_reward(*, penalty: Share = 0.25) -> FrameFunction:
    """Lower the reward of answers that the policy would give anyway (arXiv:2506.02355).

    reward * (1 - penalty * (n - rank) / n), with the rank of the answer among the n of its group
    by the behavior policy's probability of it, 0 for the likeliest; of equal ones the first id.
    Rewards of 0 or less stay, as wrong answers have 0 in the paper. NULL without log-probs.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "group_id": "g", "reward": 1.0,
    ...                      "logprobs": [[-0.5], [-2.0]], "loss_mask": [[True], [True]]})
    >>> rows.pipe(unlikeliness_reward(penalty=0.5))["reward"].to_list()
    [0.5, 0.75]
    """
    likely = pl.col(_LIKELIHOOD)
    order = pl.struct(-likely, "experience_id").rank("ordinal").over(GROUP, likely.is_null())
    num = likely.count().over(GROUP)
    lowered = reward * (1 - penalty * (num - (order - 1)) / num)
    shaped = pl.when(reward > 0).then(lowered).otherwise(reward)

    def shape(frame: pl.LazyFrame) -> pl.LazyFrame:
        known = answer_logprobs(frame, into=_LIKELIHOOD)
        message = pl.when(likely.is_not_null()).then(shaped).alias("reward")
        return known.with_columns(message).drop(_LIKELIHOOD)

    return shape
