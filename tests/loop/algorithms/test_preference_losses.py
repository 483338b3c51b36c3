"""Losses of pairs against the papers' formulas, in float64 without torch, and against TRL's."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.losses import Rows, batch_of, examples_of, logprobs_of, padded, ragged

from rlake.loop.algorithms import resolve
from rlake.store.errors import ConfigError

Worth = Callable[[Rows, int], tuple[float, np.ndarray]]
"""What a row is worth, and the derivative by the log-prob of each of its tokens."""
Curve = Callable[[float], tuple[float, float]]
"""The loss of a pair by the margin of its rows, and its derivative."""


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_ratio(beta: float, *, mean: bool) -> Worth:
    """beta log(pi / pi_reference), summed over tokens or their mean."""

    def worth(rows: Rows, i: int) -> tuple[float, np.ndarray]:
        size = rows.mask[i].sum() if mean else 1
        total = 0.0
        for t in np.flatnonzero(rows.mask[i]):
            total += float(rows.new[i][t] - rows.tokens["reference"][i][t])
        return beta * total / size, beta * rows.mask[i] / size

    return worth


def mean_logprob(beta: float) -> Worth:
    def worth(rows: Rows, i: int) -> tuple[float, np.ndarray]:
        size = rows.mask[i].sum()
        return beta * rows.new[i][rows.mask[i]].sum() / size, beta * rows.mask[i] / size

    return worth


def log_odds(rows: Rows, i: int) -> tuple[float, np.ndarray]:
    """log P / (1 - P), where log P is the mean log-prob; its derivative by log P is 1 / (1 - P)."""
    logp, slope = mean_logprob(1.0)(rows, i)
    p = math.exp(logp)
    return math.log(p / (1 - p)), slope / (1 - p)


def logistic(z: float) -> tuple[float, float]:
    return -math.log(sigmoid(z)), sigmoid(z) - 1


def smoothed(wrong: float) -> Curve:
    """Conservative DPO: the label's loss and its opposite's."""

    def curve(z: float) -> tuple[float, float]:
        value = -(1 - wrong) * math.log(sigmoid(z)) - wrong * math.log(sigmoid(-z))
        return value, -(1 - wrong) * sigmoid(-z) + wrong * sigmoid(z)

    return curve


def robust(wrong: float) -> Curve:
    """Equation 10 of arXiv:2403.00409."""

    def curve(z: float) -> tuple[float, float]:
        value = -(1 - wrong) * math.log(sigmoid(z)) + wrong * math.log(sigmoid(-z))
        slope = -(1 - wrong) * sigmoid(-z) - wrong * sigmoid(z)
        return value / (1 - 2 * wrong), slope / (1 - 2 * wrong)

    return curve


def squared(beta: float) -> Curve:
    """Equation 17 of arXiv:2310.12036, by beta times the difference of log-ratios."""

    def curve(z: float) -> tuple[float, float]:
        distance = z / beta - 1 / (2 * beta)
        return distance**2, 2 * distance / beta

    return curve


def beyond(gamma: float) -> Curve:
    return lambda z: logistic(z - gamma)


def weighted(coef: float) -> Curve:
    return lambda z: (coef * logistic(z)[0], coef * logistic(z)[1])


CASES: list[Any] = [
    ({"dpo": {}}, log_ratio(0.1, mean=False), logistic),
    ({"dpo": {"beta": 0.5}}, log_ratio(0.5, mean=False), logistic),
    ({"dpo": {"normalize": True, "beta": 2.0}}, log_ratio(2.0, mean=True), logistic),
    ({"dpo": {"label_smoothing": 0.2}}, log_ratio(0.1, mean=False), smoothed(0.2)),
    (
        {"dpo": {"label_smoothing": 0.2, "noise": "unbiased"}},
        log_ratio(0.1, mean=False),
        robust(0.2),
    ),
    ({"ipo": {"beta": 0.3}}, log_ratio(0.3, mean=True), squared(0.3)),
    ({"ipo": {"beta": 0.3, "length": "sum"}}, log_ratio(0.3, mean=False), squared(0.3)),
    ({"simpo": {}}, mean_logprob(2.0), beyond(1.0)),
    ({"simpo": {"beta": 2.5, "gamma": 0.3}}, mean_logprob(2.5), beyond(0.3)),
    ({"orpo": {"ratio_coef": 0.25}}, log_odds, weighted(0.25)),
]
NAMED = [pytest.param(*case, id=str(case[0])) for case in CASES]


def expected(rows: Rows, worth: Worth, curve: Curve, *, imitate: bool) -> tuple[float, np.ndarray]:
    """The mean loss of the pairs, weighted as they were drawn, and its gradient."""
    pairs = len(rows) // 2
    loss, gradient = 0.0, np.zeros((len(rows), max(map(len, rows.new))))
    for chosen in range(0, len(rows), 2):
        (good, good_slope), (bad, bad_slope) = worth(rows, chosen), worth(rows, chosen + 1)
        value, slope = curve(good - bad)
        scale = rows.weight[chosen] / pairs
        loss += scale * value
        gradient[chosen, : len(good_slope)] = scale * slope * good_slope
        gradient[chosen + 1, : len(bad_slope)] = -scale * slope * bad_slope
        if imitate:
            logp, logp_slope = mean_logprob(1.0)(rows, chosen)
            loss -= scale * logp
            gradient[chosen, : len(logp_slope)] -= scale * logp_slope
    return loss, gradient


@pytest.mark.parametrize(("spec", "worth", "curve"), NAMED)
def test_the_loss_of_pairs_and_its_gradient_are_those_of_the_paper(
    spec: dict[str, Any], worth: Worth, curve: Curve
) -> None:
    for seed in range(4):
        rows = ragged(seed, pairs=True)
        batch, new_BT = padded(rows, more=seed)
        loss = resolve(spec).loss(batch, new_BT)
        loss.value.backward()
        value, gradient = expected(rows, worth, curve, imitate="orpo" in spec)
        assert loss.value.item() == pytest.approx(value, rel=1e-12)
        assert new_BT.grad is not None
        found = new_BT.grad.numpy()
        np.testing.assert_allclose(found[:, : gradient.shape[1]], gradient, rtol=1e-9, atol=1e-15)
        assert not found[:, gradient.shape[1] :].any()


@pytest.mark.parametrize(("spec", "worth", "curve"), NAMED)
def test_losses_of_pairs_measure_how_well_they_rank(
    spec: dict[str, Any], worth: Worth, curve: Curve
) -> None:
    del curve
    rows = ragged(7, rows=10, pairs=True)
    batch, new_BT = padded(rows)
    found = {name: m.item() for name, m in resolve(spec).loss(batch, new_BT).metrics.items()}
    good, bad = [[worth(rows, i)[0] for i in range(s, len(rows), 2)] for s in (0, 1)]
    sums = [new[mask].sum() for new, mask in zip(rows.new, rows.mask, strict=True)]
    ranked = np.mean([g > b for g, b in zip(good, bad, strict=True)])
    assert 0 < ranked < 1
    told = {
        "chosen_reward": np.mean(good),
        "rejected_reward": np.mean(bad),
        "reward_margin": np.mean(good) - np.mean(bad),
        "accuracy": ranked,
        "chosen_logp": np.mean(sums[0::2]),
        "rejected_logp": np.mean(sums[1::2]),
    }
    if "orpo" in spec:
        told["nll"] = -np.mean([mean_logprob(1.0)(rows, i)[0] for i in range(0, len(rows), 2)])
    assert found == pytest.approx(told, rel=1e-12)


def test_a_policy_that_is_the_reference_ranks_nothing() -> None:
    rows = ragged(0, pairs=True)
    rows = Rows(
        rows.tokens["reference"], rows.mask, rows.advantage, rows.weight, rows.tokens, pairs=True
    )
    batch, new_BT = padded(rows)
    loss = resolve("dpo").loss(batch, new_BT)
    assert loss.metrics["accuracy"].item() == 0.5
    assert loss.value.item() == pytest.approx(math.log(2) * rows.weight[0::2].mean(), rel=1e-12)


@pytest.mark.parametrize("spec", [case[0] for case in CASES])
def test_a_batch_without_pairs_has_no_loss(spec: dict[str, Any]) -> None:
    rows = examples_of(ragged(0, pairs=True))
    empty = rows.padded([], totals=rows.totals, pad_id=0)
    logprobs_BT = torch.zeros(1, 1, dtype=torch.double, requires_grad=True)
    loss = resolve(spec).loss(empty, logprobs_BT)
    loss.value.backward()
    assert loss.value.item() == 0.0
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad.item() == 0.0


def test_odds_of_a_certain_answer_give_no_loss_that_is_not_a_number() -> None:
    rows = ragged(1, pairs=True)
    certain = Rows([0 * n for n in rows.new], rows.mask, rows.advantage, rows.weight, rows.tokens,
                   pairs=True)  # fmt: skip
    batch, new_BT = padded(certain)
    loss = resolve("orpo").loss(batch, new_BT)
    loss.value.backward()
    assert math.isfinite(loss.value.item())
    assert new_BT.grad is not None
    assert torch.isfinite(new_BT.grad).all()


def test_a_label_that_is_as_often_wrong_as_right_is_refused() -> None:
    with pytest.raises(ConfigError, match="`label_smoothing` of `dpo`: input should be less than"):
        resolve({"dpo": {"label_smoothing": 0.5}})


@pytest.mark.slow
def test_losses_of_pairs_and_their_gradients_are_those_of_trl() -> None:
    from support.trl_losses import dpo_of_trl, odds_of_trl, simpo_of_trl

    cases: list[tuple[dict[str, Any], Callable[[Rows, torch.Tensor], torch.Tensor]]] = [
        ({"dpo": {}}, lambda r, x: dpo_of_trl(r, x, "sigmoid", beta=0.1)),
        (
            {"dpo": {"label_smoothing": 0.1, "noise": "unbiased"}},
            lambda r, x: dpo_of_trl(r, x, "robust", beta=0.1, smoothing=0.1),
        ),
        (
            {"dpo": {"normalize": True, "beta": 3.0}},
            lambda r, x: dpo_of_trl(r, x, "sigmoid_norm", beta=3.0),
        ),
        ({"ipo": {"beta": 0.2}}, lambda r, x: dpo_of_trl(r, x, "ipo", beta=0.2)),
        ({"simpo": {}}, lambda r, x: simpo_of_trl(r, x, beta=2.0, gamma=1.0)),
        ({"orpo": {"ratio_coef": 0.3}}, lambda r, x: odds_of_trl(r, x, beta=0.3) + imitation(r, x)),
    ]
    for spec, trl in cases:
        for seed in range(3):
            rows = replace(ragged(seed, pairs=True), weight=np.ones(6))
            ours_BT, theirs_BT = logprobs_of(rows), logprobs_of(rows)
            ours = resolve(spec).loss(batch_of(examples_of(rows)), ours_BT).value
            theirs = trl(rows, theirs_BT)
            ours.backward()
            theirs.backward()
            assert ours.item() == pytest.approx(theirs.item(), rel=1e-5), spec
            assert ours_BT.grad is not None
            assert theirs_BT.grad is not None
            torch.testing.assert_close(ours_BT.grad, theirs_BT.grad, rtol=1e-4, atol=1e-7)


def imitation(rows: Rows, logprobs_BT: torch.Tensor) -> torch.Tensor:
    """What TRL adds for ORPO, but over answers alone, as in the paper: there prompts count too."""
    batch = batch_of(examples_of(rows))
    return -batch.mean_tokens(logprobs_BT)[0::2].mean()
