"""Off-policy correction: what rows of another policy count, against float64 by hand."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.losses import (
    Rows,
    Token,
    assert_loss_is,
    batch_of,
    clipped,
    examples_of,
    logprobs_of,
    ragged,
)

from rlake.loop.algorithms import names, resolve
from rlake.loop.algorithms.grpo import GRPO
from rlake.loop.losses import Correction, PolicyGradient
from rlake.loop.losses.importance import Level
from rlake.store.errors import ConfigError


def ratio(rows: Rows, i: int, t: int, level: str) -> float:
    """pi_proximal / pi_behavior of a token, of its sequence, or its geometric mean."""
    logs = (rows.tokens["proximal"][i] - rows.old[i])[rows.mask[i]]
    if level == "sequence":
        return math.exp(sum(logs))
    if level == "geometric":
        return math.exp(sum(logs) / len(logs))
    return math.exp(rows.tokens["proximal"][i][t] - rows.old[i][t])


def expected(rows: Rows, options: dict[str, Any]) -> list[np.ndarray]:
    """What each trained token counts."""
    weights = [np.ones(len(mask)) for mask in rows.mask]
    level = options.get("weights", "token" if options.get("decoupled") else "none")
    for i, mask in enumerate(rows.mask):
        for t in np.flatnonzero(mask):
            w = 1.0
            if level != "none":
                w = min(ratio(rows, i, int(t), level), options.get("cap") or math.inf)
            low, high = options.get("mask_below", 0.0), options.get("mask_above") or math.inf
            if not low <= ratio(rows, i, int(t), options.get("mask", "token")) <= high:
                w = 0.0
            if "half_life" in options and not math.isnan(rows.rows["lag"][i]):
                w *= 0.5 ** (rows.rows["lag"][i] / options["half_life"])
            weights[i][t] = w
    return weights


CASES: list[dict[str, Any]] = [
    {"decoupled": True, "cap": None},
    {"decoupled": True, "cap": 1.1},
    {"weights": "token", "cap": 1.5},
    {"weights": "sequence", "cap": 3.0},
    {"weights": "sequence", "cap": None},
    {"weights": "geometric", "cap": 1.05},
    {"weights": "none", "mask_below": 0.8, "mask_above": 1.3},
    {"decoupled": True, "mask": "geometric", "mask_below": 0.9, "mask_above": 1.1, "cap": None},
    {"weights": "token", "mask": "sequence", "mask_above": 2.0, "cap": None},
    {"half_life": 2.0},
    {"decoupled": True, "cap": 1.2, "mask_below": 0.7, "half_life": 3.0},
]


def stale(seed: int) -> Rows:
    """Rows of lags from 0 to 5, and one whose lag is not known."""
    rows = ragged(seed)
    lag = rows.rows["lag"].copy()
    lag[1] = math.nan
    return replace(rows, rows={**rows.rows, "lag": lag})


@pytest.mark.parametrize("options", CASES, ids=str)
def test_each_token_counts_what_the_formula_says(options: dict[str, Any]) -> None:
    seen: set[float] = set()
    for seed in range(4):
        rows = stale(seed)
        found = Correction(**options).prepare(examples_of(rows)).tokens["correction"]
        is_trained = np.concatenate(rows.mask)
        wanted = np.concatenate(expected(rows, options))[is_trained]
        np.testing.assert_allclose(found.numpy()[is_trained], wanted, rtol=1e-12)
        seen |= set(wanted.round(9))
    assert len(seen) > 1
    if options.get("mask_above"):
        assert 0.0 in seen


def surrogate(weights: list[np.ndarray]) -> Token:
    """Equation 5 of arXiv:2505.24298, negated, and its slope; ratios are to pi_proximal."""

    def token(rows: Rows, i: int, t: int) -> tuple[float, float]:
        u = math.exp(rows.new[i][t] - rows.tokens["proximal"][i][t])
        loss, slope = clipped(u, rows.advantage[i], 0.2, 0.2)
        return weights[i][t] * loss, weights[i][t] * slope

    return token


@pytest.mark.parametrize("options", [{"decoupled": True, "cap": 1.3}, {"weights": "sequence"}])
def test_the_decoupled_loss_and_its_gradient_are_the_papers(options: dict[str, Any]) -> None:
    algorithm = GRPO(correction=Correction(**options))
    for seed in range(3):
        rows = stale(seed)
        token = surrogate(expected(rows, {"cap": 2.0} | options))
        assert_loss_is(algorithm, rows, token, how="seq-mean-token-mean")


def test_without_weights_the_decoupled_loss_takes_stale_rows_for_fresh_ones() -> None:
    rows = stale(4)
    algorithm = GRPO(correction=Correction(decoupled=True, weights="none"))
    ones = [np.ones(len(mask)) for mask in rows.mask]
    assert_loss_is(algorithm, rows, surrogate(ones), how="seq-mean-token-mean")


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_loss_without_a_ratio_is_importance_weighted(level: Level) -> None:
    """Minus w log pi A, summed over each answer: the mean over answers of REINFORCE, off policy."""
    rows = stale(2)
    algorithm = resolve({"reinforce": {"correction": {"weights": level, "cap": None}}})
    weights = expected(rows, {"weights": level})

    def token(rows: Rows, i: int, t: int) -> tuple[float, float]:
        counted = rows.advantage[i] * weights[i][t]
        return -counted * rows.new[i][t], -counted

    assert_loss_is(algorithm, rows, token, how="seq-mean-token-sum")


def test_on_policy_nothing_is_corrected() -> None:
    rows = stale(5)
    rows = replace(rows, tokens={**rows.tokens, "proximal": rows.old})
    for options in CASES[:-2]:
        if "half_life" not in options:
            found = Correction(**options).prepare(examples_of(rows)).tokens["correction"]
            np.testing.assert_allclose(found, 1.0, rtol=1e-12)


def test_without_options_there_is_no_correction_and_no_pass_to_measure_it() -> None:
    correction = Correction()
    rows = examples_of(stale(0))
    assert correction.prepare(rows) is rows
    assert correction.needs == {"logprobs"}
    assert correction.metrics(batch_of(rows)) == {}
    assert "proximal" in Correction(mask_above=2.0).needs
    assert "proximal" not in Correction(half_life=2.0).needs


@pytest.mark.parametrize("options", CASES, ids=str)
def test_the_weights_are_described_for_the_step_as_a_whole(options: dict[str, Any]) -> None:
    rows = stale(6)
    algorithm = GRPO(correction=Correction(**options))
    batch = batch_of(algorithm.prepare(examples_of(rows)))
    found = algorithm.loss(batch, logprobs_of(rows)).metrics
    is_trained = np.concatenate(rows.mask)
    w = np.concatenate(expected(rows, options))[is_trained]
    assert found["importance"].item() == pytest.approx(w.mean(), rel=1e-12)
    ess = w.sum() ** 2 / (len(w) * (w**2).sum())
    assert found["importance_ess"].item() == pytest.approx(ess, rel=1e-12)
    if "half_life" in options:
        return
    if options.get("mask_above"):
        assert found["importance_masked"].item() == pytest.approx((w == 0).mean(), rel=1e-12)
    if options.get("cap"):
        cut = (w == options["cap"]).mean() if not options.get("mask_above") else None
        assert found["importance_truncated"].item() == pytest.approx(cut, rel=1e-12)


def test_rows_of_a_version_that_a_resumed_run_has_yet_to_reach_count_once() -> None:
    rows = examples_of(stale(3)).with_rows(lag=torch.tensor([-2.0, 0.0, 2.0, 4.0, math.nan, 0.0]))
    found = Correction(half_life=2.0).prepare(rows).tokens["correction"]
    per_row = [found[rows.row_N == i][0].item() for i in range(6)]
    assert per_row == pytest.approx([1.0, 1.0, 0.5, 0.25, 1.0, 1.0])


def test_measurements_of_parts_of_a_step_add_up_to_the_steps() -> None:
    rows = stale(7)
    algorithm = GRPO(correction=Correction(**CASES[-1]))
    batch, new_BT = batch_of(algorithm.prepare(examples_of(rows))), logprobs_of(rows).detach()
    whole = algorithm.loss(batch, new_BT).metrics
    cuts = [torch.tensor([4]), torch.tensor([0, 1, 5]), torch.tensor([2, 3])]
    parts = [algorithm.loss(batch.take(cut), new_BT[cut]).metrics for cut in cuts]
    for name, value in whole.items():
        assert sum(p[name].item() for p in parts) == pytest.approx(value.item(), rel=1e-10), name


def test_all_masked_out_is_a_step_that_teaches_nothing() -> None:
    rows = stale(8)
    algorithm = GRPO(correction=Correction(mask_below=1e6, mask_above=2e6))
    new_BT = logprobs_of(rows)
    loss = algorithm.loss(batch_of(algorithm.prepare(examples_of(rows))), new_BT)
    loss.value.backward()
    assert new_BT.grad is not None
    assert not new_BT.grad.any()
    assert loss.metrics["importance_masked"].item() == pytest.approx(1)
    assert loss.metrics["importance_ess"].item() == 0


def test_a_token_that_the_sampler_thought_impossible_counts_the_cap() -> None:
    rows = stale(9)
    old = [o - 500 * m for o, m in zip(rows.old, rows.mask, strict=True)]
    rows = replace(rows, tokens={**rows.tokens, "logprobs": old})
    for level in ("token", "sequence"):
        found = Correction(weights=level).prepare(examples_of(rows)).tokens["correction"]
        assert set(found[torch.tensor(np.concatenate(rows.mask))].tolist()) == {2.0}


def policy_gradients() -> list[str]:
    made = {name: resolve(name) for name in names()}
    return [n for n, a in made.items() if isinstance(a, PolicyGradient) and "logprobs" in a.needs]


@pytest.mark.parametrize("name", policy_gradients())
def test_every_policy_gradient_takes_a_correction(name: str) -> None:
    rows = stale(3)
    rows = replace(rows, rows={**rows.rows, "lag": np.full(6, 2.0)})
    gradients = []
    for half_life in (1.0, 2.0):
        algorithm = resolve({name: {"correction": {"half_life": half_life}}})
        new_BT = logprobs_of(rows)
        algorithm.loss(batch_of(algorithm.prepare(examples_of(rows))), new_BT).value.backward()
        assert new_BT.grad is not None
        gradients.append(new_BT.grad)
    changed = gradients[0] != gradients[1]
    assert changed.any()  # the rows of an expert in a mixture are not corrected
    np.testing.assert_allclose(2 * gradients[0][changed], gradients[1][changed], rtol=1e-9)


def test_importance_weights_make_a_stale_gradient_the_fresh_one_in_the_mean() -> None:
    """Exact over all answers of two tokens: the mean over the old policy is that over the new."""
    rng = np.random.default_rng(0)
    first, second = rng.normal(0, 1, 3), rng.normal(0, 1, (3, 3))
    moved = [x + rng.normal(0, 0.4, x.shape) for x in (first, second)]
    reward = rng.normal(0, 1, (3, 3))

    def log_softmax(x: np.ndarray) -> np.ndarray:
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    new, old = [log_softmax(x) for x in (first, second)], [log_softmax(x) for x in moved]
    answers = list(itertools.product(range(3), range(3)))
    tokens = {
        name: [np.array([0.0, p[0][a], p[1][a, b]]) for a, b in answers]
        for name, p in (("logprobs", old), ("proximal", new))
    }
    credit = np.array([reward[a, b] for a, b in answers])
    rows = Rows(
        tokens["proximal"],
        [np.array([False, True, True])] * 9,
        credit,
        np.array([math.exp(old[0][a] + old[1][a, b]) for a, b in answers]),  # how often each comes
        tokens,
        {"reward": credit, "group": np.zeros(9)},
    )

    def gradient(correction: Correction) -> np.ndarray:
        algorithm = GRPO(correction=correction, aggregation="seq-mean-token-sum")
        new_BT = logprobs_of(rows)
        algorithm.loss(batch_of(algorithm.prepare(examples_of(rows))), new_BT).value.backward()
        assert new_BT.grad is not None
        by_logit = np.zeros(3)
        for i, (a, _) in enumerate(answers):  # d log softmax = one-hot - p
            by_logit += float(new_BT.grad[i, 1]) * (np.eye(3)[a] - np.exp(new[0]))
        return -9 * by_logit

    p, q = np.exp(new[0]), np.exp(new[1])
    value = (q * reward).sum(1)
    true = p * (value - p @ value)
    np.testing.assert_allclose(gradient(Correction(weights="sequence", cap=None)), true, rtol=1e-9)
    uncorrected = gradient(Correction(decoupled=True, weights="none"))
    assert np.abs(uncorrected - true).max() > 0.1 * np.abs(true).max()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mask_above": 0.5, "mask_below": 0.5}, "every token would be masked out"),
        ({"cap": 0}, "`cap` of `correction` of `grpo`: input should be greater than 0, got 0"),
        ({"weights": "batch"}, "`weights` of `correction` of `grpo`: input should be 'token'"),
        ({"half_life": -1}, "`half_life` of `correction` of `grpo`: input should be greater"),
        ({"caps": 1}, "`correction` of `grpo` has no parameter `caps`; did you mean `cap`?"),
    ],
)
def test_a_correction_that_makes_no_sense_is_refused(options: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"grpo": {"correction": options}})
    assert said in str(caught.value)
