"""REINFORCE and its relatives against the papers' formulas, token by token in float64."""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import polars as pl
import pytest
from support.losses import NORM, Rows, Token, apart, assert_loss_is, ragged

from rlake.loop.algorithms import resolve
from rlake.loop.algorithms.rec import REC
from rlake.loop.algorithms.sapo import SAPO
from rlake.loop.algorithms.topr import TOPR
from rlake.loop.losses import Aggregation

AGGREGATIONS = get_args(Aggregation)
SEEDS = range(4)


def ratio(rows: Rows, i: int, t: int) -> float:
    return math.exp(apart(rows, i, t))


def trained(rows: Rows, i: int) -> list[int]:
    return [int(t) for t in np.flatnonzero(rows.mask[i])]


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("name", ["reinforce", "rloo", "opmd", "asymre", "r3l"])
def test_the_policy_gradient_is_log_probability_times_advantage(
    name: str, how: Aggregation
) -> None:
    """As in arXiv:2402.14740, without ratio; OPMD (arXiv:2505.17826) divides by 1 + tau."""
    params: dict[str, Any] = {"aggregation": how, "norm": NORM}
    params |= {"tau": 0.5} if name == "opmd" else {}

    def token(rows: Rows, i: int, t: int) -> tuple[float, float]:
        credit = rows.advantage[i] / (1.5 if name == "opmd" else 1.0)
        return -credit * rows.new[i][t], -credit

    for seed in SEEDS:
        assert_loss_is(resolve({name: params}), ragged(seed), token, how=how, more=seed)


REWARDS = [1.0, 0.0, 0.5, 3.0]
MEAN, STD = statistics.mean(REWARDS), statistics.stdev(REWARDS)

BASELINES: list[tuple[Any, list[float]]] = [
    ("reinforce", [r - MEAN for r in REWARDS]),
    ({"reinforce": {"baseline": 0.25}}, [r - 0.25 for r in REWARDS]),
    ("rloo", [r - (sum(REWARDS) - r) / 3 for r in REWARDS]),
    ("opmd", [r - MEAN for r in REWARDS]),
    (
        {"opmd": {"baseline": "log_mean_exp", "tau": 2.0}},
        [r - 2 * math.log(statistics.mean(math.exp(r / 2) for r in REWARDS)) for r in REWARDS],
    ),
    ("asymre", [r - (MEAN - 0.1) for r in REWARDS]),
    ("r3l", [(r - MEAN) * (3.0 if r > MEAN else 1.0) for r in REWARDS]),
    ({"r3l": {"alpha": 2.0, "solved": 1.0}}, [1.0, 0.0 - MEAN, 0.5 - MEAN, 1.0]),
    ({"topr": {"baseline": 1.0}}, [r - 1.0 for r in REWARDS]),
    ("sppo", [r - MEAN for r in REWARDS]),
    ("rec", [r - MEAN for r in REWARDS]),
    ({"rec": {"normalize": "std"}}, [(r - MEAN) / (STD + 1e-6) for r in REWARDS]),
    ("sapo", [(r - MEAN) / (STD + 1e-6) for r in REWARDS]),
]


@pytest.mark.parametrize(("algorithm", "expected"), BASELINES, ids=[str(b[0]) for b in BASELINES])
def test_advantages_are_rewards_less_the_papers_baseline(
    algorithm: Any, expected: list[float]
) -> None:
    ids = [f"e{i}" for i in range(4)]
    frame = pl.DataFrame({"experience_id": ids, "group_id": "g", "reward": REWARDS})
    credit = resolve(algorithm).advantage()
    assert credit is not None
    assert frame.pipe(credit)["advantage"].to_list() == pytest.approx(expected, rel=1e-9)


def test_algorithms_that_need_no_group_draw_rows() -> None:
    grouped = {name: resolve(name).grouped for name in ("reinforce", "topr", "rloo", "opmd")}
    assert grouped == {"reinforce": False, "topr": False, "rloo": True, "opmd": True}


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_topr_tapers_bad_answers_by_the_ratio_of_the_whole_answer(how: Aggregation) -> None:
    """arXiv:2503.14286: clip(pi(y) / mu(y), 0, 1) where the reward is negative."""
    tapers = []

    def token(rows: Rows, i: int, t: int) -> tuple[float, float]:
        whole = math.prod(ratio(rows, i, t) for t in trained(rows, i))
        taper = min(max(whole, 0.0), 1.0) if rows.advantage[i] < 0 else 1.0
        tapers.append(taper)
        return -taper * rows.advantage[i] * rows.new[i][t], -taper * rows.advantage[i]

    for seed in range(6):
        assert_loss_is(TOPR(aggregation=how, norm=NORM), ragged(seed), token, how=how, more=seed)
    assert 0.1 < np.mean(np.array(tapers) < 1.0) < 0.9


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_sapo_takes_the_gradient_of_its_soft_gate(how: Aggregation) -> None:
    """arXiv:2511.20347: the objective, and its gradient in closed form."""
    made = SAPO(tau_negative=1.4, aggregation=how, norm=NORM)
    for seed in SEEDS:
        assert_loss_is(made, ragged(seed, spread=1.0), gated(1.4), how=how, more=seed)


def gated(tau_negative: float) -> Token:
    """The loss of a soft gate, and its slope."""

    def token(rows: Rows, i: int, t: int) -> tuple[float, float]:
        credit, r = rows.advantage[i], ratio(rows, i, t)
        tau = 1.0 if credit > 0 else tau_negative
        p = 1 / (1 + math.exp(-tau * (r - 1)))
        return -4 / tau * p * credit, -4 * p * (1 - p) * r * credit

    return token


def test_sapo_fades_where_a_ratio_is_large_and_is_the_policy_gradient_where_it_is_one() -> None:
    rows = ragged(0)

    def token(rows: Rows, i: int, t: int) -> tuple[float, float]:
        del t
        tau = 1.0 if rows.advantage[i] > 0 else 1.05
        return -2 / tau * rows.advantage[i], -rows.advantage[i]

    same = replace(rows, new=rows.old)
    found = assert_loss_is(SAPO(), same, token, how="seq-mean-token-mean")
    assert found["gate"].item() == pytest.approx(1.0)
    far = replace(rows, new=[old + 3.0 for old in rows.old])
    gate = assert_loss_is(SAPO(), far, gated(1.05), how="seq-mean-token-mean")
    assert gate["gate"].item() < 1e-5


CLIPS: list[dict[str, float]] = [
    {},
    {"clip": 0.3, "clip_high": 0.1},
    {"mask_high": 0.2},
    {"mask_low": 0.2, "mask_high": 0.4, "clip": 0.9},
]


@pytest.mark.parametrize("params", CLIPS)
def test_cispo_clips_what_tokens_count_and_not_their_gradient(params: dict[str, float]) -> None:
    """arXiv:2506.13585, the objective and its unified form with a mask."""
    low = 1 - params["clip"] if "clip" in params else 0.0
    high = 1 + params.get("clip_high", 0.28)
    for seed in SEEDS:
        rows = ragged(seed)

        def token(rows: Rows, i: int, t: int) -> tuple[float, float]:
            credit, r = rows.advantage[i], ratio(rows, i, t)
            is_out = credit > 0 and r > 1 + params.get("mask_high", math.inf)
            is_out |= credit < 0 and r < 1 - params.get("mask_low", math.inf)
            weight = 0.0 if is_out else min(max(r, low), high)
            return -weight * credit * rows.new[i][t], -weight * credit

        found = assert_loss_is(resolve({"cispo": params}), rows, token, how="token-mean", more=seed)
        outside = [not low <= ratio(rows, i, t) <= high for i in range(6) for t in trained(rows, i)]
        assert found["clip_fraction"].item() == pytest.approx(np.mean(outside))
        assert ("kept_fraction" in found) == bool(params.keys() & {"mask_low", "mask_high"})


def is_in_one_side(r: float, credit: float) -> bool:
    return (credit >= 0 and r <= 1.2) or (credit <= 0 and r >= 0.9)


IN_RANGE: dict[str, Callable[[float, float, float], bool]] = {
    "none": lambda r, whole, credit: True,
    "two-sided": lambda r, whole, credit: 0.9 <= r <= 1.2,
    "one-sided": lambda r, whole, credit: is_in_one_side(r, credit),
    "one-sided-sequence": lambda r, whole, credit: is_in_one_side(whole, credit),
    "ring": lambda r, whole, credit: (
        0.9 <= r <= 1.2 or (credit > 0 and r <= 0.7) or (credit < 0 and r >= 1.5)
    ),
}
"""Section 4 of arXiv:2509.24203: which tokens each way of clipping keeps."""
WEIGHTS: dict[str, Callable[[float, float, float], float]] = {
    "none": lambda r, whole, credit: 1.0,
    "importance": lambda r, whole, credit: r,
    "sequence-importance": lambda r, whole, credit: whole,
    "advantage": lambda r, whole, credit: math.exp(credit / 0.7),
}
RANGES = {"clip": 0.1, "clip_high": 0.2, "outer": 0.3, "outer_high": 0.5, "temperature": 0.7}


@pytest.mark.parametrize("weighting", WEIGHTS)
@pytest.mark.parametrize("clipping", IN_RANGE)
@pytest.mark.parametrize("regularizer", ["none", "k2", "forward-kl"])
def test_every_variant_of_rec_is_the_papers(
    clipping: str, weighting: str, regularizer: str
) -> None:
    params = {"clipping": clipping, "weighting": weighting, "regularizer": regularizer}
    made = resolve({"rec": {**RANGES, **params, "coef": 0.3}})
    for seed in (0, 1):
        rows = ragged(seed)
        wholes = [math.exp(np.mean((rows.new[i] - rows.old[i])[rows.mask[i]])) for i in range(6)]

        def token(rows: Rows, i: int, t: int, wholes: list[float] = wholes) -> tuple[float, float]:
            credit, r, new = rows.advantage[i], ratio(rows, i, t), rows.new[i][t]
            counts = WEIGHTS[weighting](r, wholes[i], credit) * credit
            counts *= IN_RANGE[clipping](r, wholes[i], credit)
            loss, slope = -counts * new, -counts
            apart = new - rows.old[i][t]
            if regularizer == "k2":
                return loss + 0.15 * apart**2, slope + 0.3 * apart
            if regularizer == "forward-kl":
                return loss - 0.3 * new, slope - 0.3
            return loss, slope

        found = assert_loss_is(made, rows, token, how="token-mean", more=seed)
        kept = [
            IN_RANGE[clipping](ratio(rows, i, t), wholes[i], rows.advantage[i])
            for i in range(6)
            for t in trained(rows, i)
        ]
        assert found["clip_fraction"].item() == pytest.approx(1 - np.mean(kept))


def test_ways_of_clipping_of_rec_keep_different_tokens() -> None:
    kept: dict[str, list[bool]] = {name: [] for name in IN_RANGE}
    for seed in range(3):
        rows = ragged(seed)
        for i, credit in enumerate(rows.advantage):
            whole = math.exp(np.mean((rows.new[i] - rows.old[i])[rows.mask[i]]))
            for name, is_in in IN_RANGE.items():
                kept[name] += [is_in(ratio(rows, i, t), whole, credit) for t in trained(rows, i)]
    assert len({tuple(found) for found in kept.values()}) == len(IN_RANGE)


def test_rec_keeps_as_many_bad_answers_as_good_ones_when_it_drops() -> None:
    ids = [f"e{i}" for i in range(4)]
    frame = pl.DataFrame({"experience_id": ids, "group_id": "g", "reward": [1.0, 0.0, 0.0, 0.0]})
    credit = REC(drop="balance").advantage()
    assert sorted(frame.pipe(credit)["advantage"]) == [-0.5, 0.0, 0.0, 0.5]
