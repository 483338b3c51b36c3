"""Advantages of rollouts that are several rows, one a step."""

from itertools import pairwise
from typing import Literal

import numpy as np
import polars as pl

from ..body import Declared, on_all_rows
from ..decorator import operator
from ..parameters import Count, Positive, Share
from ..statistics import GROUP, centered, reward, zscore

_ROLLOUT = (GROUP, "rollout_index")
_PLACE, _LENGTH, _OUTCOME = "place_in_rollout", "rows_of_rollout", "outcome_of_rollout"
_OWN, _RETURN, _EPISODE = "reward_of_step", "return_of_step", "return_of_episode"
_ADDED = (_PLACE, _LENGTH, _OUTCOME, _OWN, _RETURN, _EPISODE)
_ENTRIES = pl.List(pl.Struct({"name": pl.String, "value": pl.Float64}))
DISCOUNT = "reward_discount"
"""The entry of a row's `metrics` that says what its reward is: that of its step, plus those of the
later steps, each times this once more. 0: that of its step alone. Rows without it are parts of a
rollout whose outcome is the reward of its last row."""


@operator("derive", version=2, whole_groups=True, writes=("advantage",))
def step_zscore(
    *, order: str | None = None, per_step: bool = False, epsilon: float = 1e-6
) -> Declared:
    """Give all steps of a rollout the z-score of its outcome within the group.

    GRPO (arXiv:2402.03300) over rollouts of several rows: each rollout counts once, however many
    steps it took. `per_step` divides by their number. Steps follow each other by the column
    `order`; without it, by the length of their id, then the id, as explorers name them. The
    outcome is the reward of the last step, or the sum of all steps' own rewards where `metrics`
    have `reward_discount`, as `step_wise` marks rows with rewards of their own. When it is NULL,
    all steps of the rollout have no advantage.

    >>> rows = pl.DataFrame({"experience_id": ["g/00", "g/00.1", "g/01"], "group_id": "g",
    ...                      "rollout_index": [0, 0, 1], "reward": [None, 1.0, 0.0],
    ...                      "metrics": [[]] * 3})
    >>> rows.pipe(step_zscore(epsilon=0.0))["advantage"].round(3).to_list()
    [0.707, 0.707, -0.707]
    """

    def set_advantage(frame: pl.LazyFrame) -> pl.LazyFrame:
        found = _with_returns(_placed(frame, order), _own(), 1.0)
        once = pl.when(pl.col(_PLACE) == 1).then(pl.col(_EPISODE))
        # of one row a rollout, so that long rollouts do not count more; then for all its rows
        scored = found.with_columns(zscore(once, GROUP, epsilon=epsilon).alias(_OUTCOME))
        credit = pl.col(_OUTCOME).max().over(_ROLLOUT)
        if per_step:
            credit /= pl.col(_LENGTH)
        return scored.with_columns(advantage=credit).drop(_ADDED)

    return Declared(body=set_advantage, reads=_reads(order, "reward", "metrics"))


@operator("derive", version=2, whole_groups=True, writes=("advantage",))
def gigpo(
    *,
    state: str = "prompt_text",
    step_reward: str | None = None,
    order: str | None = None,
    omega: float = 1.0,
    gamma: Share = 0.95,
    normalize: Literal["none", "std"] = "none",
    epsilon: float = 1e-6,
) -> Declared:
    """Give each step the credit of its rollout, and of its action at its state (GiGPO).

    arXiv:2505.10978: the rollout's return is compared with those of its group; the discounted
    return from the step on with those of all steps of the group at the same `state` (an anchor: a
    hash or a text of what the environment showed); advantage = first + omega * second. Both are
    less the mean, with `normalize="std"` over the deviation plus `epsilon`. A step whose state is
    NULL, or comes once, has no second part.

    `step_reward` names the column of each step's own reward. Without it, `reward` is read as rows
    say: where their `metrics` have `reward_discount`, as `step_wise` marks rows with rewards of
    their own, each step has its own; elsewhere the last step's is all that there is. A rollout of
    which one is NULL has no advantage. `order` is as in `step_zscore`.

    >>> rows = pl.DataFrame({"experience_id": ["g/00", "g/00.1", "g/01"], "group_id": "g",
    ...                      "rollout_index": [0, 0, 1], "reward": [None, 1.0, 0.0],
    ...                      "prompt_text": ["start", "door", "start"], "metrics": [[]] * 3})
    >>> rows.pipe(gigpo(gamma=0.5))["advantage"].to_list()
    [0.75, 0.5, -0.75]
    """

    def set_advantage(frame: pl.LazyFrame) -> pl.LazyFrame:
        own = pl.col(step_reward) if step_reward else _own()
        found = _with_returns(_placed(frame, order), own, gamma)
        once = pl.when(pl.col(_PLACE) == 1).then(pl.col(_EPISODE))
        scored = found.with_columns(_norm(once, GROUP).alias(_OUTCOME))
        anchored = pl.when(pl.col(state).is_not_null()).then(pl.col(_RETURN))
        by_state = _norm(anchored, GROUP, state).fill_null(0.0)
        of_rollout = pl.col(_OUTCOME).max().over(_ROLLOUT)  # NULL where it has none
        made = scored.with_columns(advantage=of_rollout + omega * by_state)
        return made.drop(_ADDED)

    def _norm(value: pl.Expr, *over: str) -> pl.Expr:
        scaled = normalize == "std"
        return zscore(value, *over, epsilon=epsilon) if scaled else centered(value, *over)

    rewards = [step_reward] if step_reward else ["reward", "metrics"]
    return Declared(body=set_advantage, reads=_reads(order, *rewards, state))


@operator("derive", whole_groups=True, writes=("advantage",))
def causal_returns(
    *,
    window: Count | None = None,
    gamma: Share | None = None,
    temperature: Positive | None = None,
    order: str | None = None,
) -> Declared:
    """Credit each row of a rollout with its own and later rewards, compared at its place.

    The return of a row is the mean of the rewards from it on, of the first `window` of them, or
    with `gamma` their discounted sum. The advantage is the return less the mean of the returns of
    the group's rows at the same place in their rollouts, times exp(advantage / `temperature`), as
    in CoD of Trinity-RFT. Rewards of rows are read as in `gigpo`; a row before a NULL one has no
    advantage. `order` is as in `step_zscore`.

    >>> rows = pl.DataFrame({"experience_id": ["g/00", "g/00.1", "g/01", "g/01.1"],
    ...                      "group_id": "g", "rollout_index": [0, 0, 1, 1],
    ...                      "reward": [0.0, 1.0, 0.0, 0.0],
    ...                      "metrics": [[{"name": "reward_discount", "value": 0.0}]] * 4})
    >>> rows.pipe(causal_returns())["advantage"].to_list()
    [0.25, 0.5, -0.25, -0.5]
    """

    def set_advantage(frame: pl.LazyFrame) -> pl.LazyFrame:
        def add(rows: pl.DataFrame) -> pl.DataFrame:
            sorting = rows.select(pl.arg_sort_by(*_ROLLOUT, _PLACE)).to_series().to_numpy()
            left = (rows[_LENGTH] - rows[_PLACE]).to_numpy()[sorting]
            made = np.empty(rows.height)
            made[sorting] = _following(rows[_OWN].to_numpy()[sorting], left, window, gamma)
            return rows.with_columns(pl.Series(_RETURN, made).fill_nan(None))

        own = _placed(frame, order).with_columns(_own().cast(pl.Float64).alias(_OWN))
        found = on_all_rows(add, {_RETURN: pl.Float64})(own)
        # later places have fewer rewards left, so that they are compared with each other alone
        apart = centered(pl.col(_RETURN), GROUP, _PLACE)
        weight = 1.0 if temperature is None else (apart / temperature).exp()
        added = (_PLACE, _LENGTH, _OWN, _RETURN)
        return found.with_columns(advantage=apart * weight).drop(added)

    return Declared(body=set_advantage, reads=_reads(order, "reward", "metrics"))


def _following(
    own: np.ndarray, left: np.ndarray, window: int | None, gamma: float | None
) -> np.ndarray:
    """Return the mean, or with `gamma` the sum, of each row's own and later rewards."""
    most = int(left.max(initial=0)) + 1
    sums, own = own.astype(np.float64), own.astype(np.float64)
    for later in range(1, min(most, window or most)):
        rows = np.flatnonzero(left >= later)
        sums[rows] += (1.0 if gamma is None else gamma**later) * own[rows + later]
    return sums if gamma is not None else sums / np.minimum(left + 1, window or most)


def _reads(order: str | None, *names: str) -> tuple[str, ...]:
    read = ("experience_id", *_ROLLOUT, *names, *([order] if order else []))
    return tuple(dict.fromkeys(read))


def _placed(frame: pl.LazyFrame, order: str | None) -> pl.LazyFrame:
    """Add the place of each row in its rollout, from 1, and how many there are."""
    # shorter ids first: the explorer names the rows of a rollout "02", "02.1" ... "02.10"
    step = pl.col(order) if order else pl.col("experience_id").str.len_bytes()

    def add(rows: pl.DataFrame) -> pl.DataFrame:
        by = rows.select(*_ROLLOUT, step.alias("step"), id="experience_id")
        in_order = by.select(pl.arg_sort_by(by.columns)).to_series()
        rollout = by[in_order].select(pl.struct(_ROLLOUT).rle_id()).to_series().to_numpy()
        starts = np.flatnonzero(np.diff(rollout.astype(np.int64), prepend=-1))
        lengths = np.diff(starts, append=rows.height)
        place, length = np.empty((2, rows.height), np.int64)
        place[in_order] = 1 + np.arange(rows.height) - starts[rollout]
        length[in_order] = lengths[rollout]
        return rows.with_columns(pl.Series(_PLACE, place), pl.Series(_LENGTH, length))

    return on_all_rows(add, {_PLACE: pl.Int64, _LENGTH: pl.Int64})(frame)


def _own() -> pl.Expr:
    """Return each step's own reward, which is 0 before the last one where rows do not have it."""
    entry = pl.element().struct
    entries = pl.col("metrics").cast(_ENTRIES)  # where no row has any, their type is not known
    marks = entries.list.eval(entry["value"].filter(entry["name"] == DISCOUNT))
    discount = marks.list.first()
    is_last = pl.col(_PLACE) == pl.col(_LENGTH)
    later = reward.shift(-1).over(_ROLLOUT, order_by=_PLACE)
    own = pl.when(is_last | (discount == 0)).then(reward).otherwise(reward - discount * later)
    return pl.when(is_last | discount.is_not_null()).then(own).otherwise(0.0)


def _with_returns(frame: pl.LazyFrame, own: pl.Expr, gamma: float) -> pl.LazyFrame:
    """Add each row's own reward, its return, and the sum of its rollout."""

    def add(rows: pl.DataFrame) -> pl.DataFrame:
        order = rows.select(pl.arg_sort_by(*_ROLLOUT, _PLACE)).to_series().to_numpy()
        own = rows[_OWN].to_numpy()[order]  # NULL is NaN, so a rollout with one has no return
        left = (rows[_LENGTH] - rows[_PLACE]).to_numpy()[order]
        first = (rows[_PLACE] - 1).to_numpy()[order]
        back = np.empty(rows.height, np.int64)
        back[order] = np.arange(rows.height)
        sums = _returns(own, left, 1.0)
        episode = sums[np.arange(rows.height) - first][back]
        later = np.where(np.isnan(episode), np.nan, _returns(own, left, gamma)[back])
        made = [pl.Series(_RETURN, later), pl.Series(_EPISODE, episode)]
        return rows.with_columns(one.fill_nan(None) for one in made)

    named = frame.with_columns(own.cast(pl.Float64).alias(_OWN))
    return on_all_rows(add, dict.fromkeys((_RETURN, _EPISODE), pl.Float64))(named)


def _returns(own: np.ndarray, left: np.ndarray, gamma: float) -> np.ndarray:
    """Return the discounted sums from each row on, of rows in order with how many are `left`."""
    sums = own.astype(np.float64)
    by_left = np.argsort(left, kind="stable")
    ends = np.cumsum(np.bincount(left)) if len(left) else np.array([], np.int64)
    for start, end in pairwise(ends):
        rows = by_left[start:end]
        sums[rows] += gamma * sums[rows + 1]
    return sums
