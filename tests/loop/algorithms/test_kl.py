"""The penalty on divergence and the bonus on entropy: values, gradients, and what they do."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support.losses import (
    NORM,
    Rows,
    assert_loss_is,
    batch_of,
    examples_of,
    logprobs_of,
    padded,
    ragged,
    share,
)
from support.tiny_models import networks, offline, table, written

from rlake.loop.algorithms import names, resolve
from rlake.loop.algorithms.grpo import GRPO
from rlake.loop.algorithms.sft import SFT
from rlake.loop.config import TrainerConfig
from rlake.loop.losses import KL, Aggregation, PolicyGradient
from rlake.loop.losses.kl import Estimator
from rlake.loop.models.token_logprobs import STATISTICS
from rlake.loop.run import train
from rlake.loop.trainer.step import Updater
from rlake.store import Store
from rlake.store.errors import ConfigError

AGGREGATIONS = get_args(Aggregation)
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


def expected(estimator: str, new: float, reference: float, old: float) -> tuple[float, float]:
    """The estimate at one token and its derivative by the new log-prob, in closed form."""
    d = new - reference
    k3 = math.exp(-d) - 1 + d
    if estimator == "corrected_k3":
        weight = math.exp(new - old)
        if weight < 2:
            return weight * k3, weight * d
        return 2 * k3, 2 * (1 - math.exp(-d))
    return {
        "k1": (d, 1.0),
        "k2": (d * d / 2, d),
        "k3": (k3, 1 - math.exp(-d)),
        "low_variance": (k3, 1 - math.exp(-d)),
        "abs": (abs(d), math.copysign(1, d)),
    }[estimator]


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_penalty_and_its_gradient_are_those_of_the_formula(
    estimator: Estimator, how: Aggregation
) -> None:
    rows = replace(ragged(1, spread=0.7), advantage=np.zeros(6))
    plain: list[float] = []

    def token(rows: Rows, i: int, t: int) -> tuple[float, float]:
        reference, old = float(rows.tokens["reference"][i][t]), float(rows.old[i][t])
        estimate, slope = expected(estimator, float(rows.new[i][t]), reference, old)
        plain.append(estimate)
        return 0.3 * estimate, 0.3 * slope

    penalized = GRPO(kl=KL(coef=0.3, estimator=estimator), aggregation=how, norm=NORM)
    found = assert_loss_is(penalized, rows, token, how=how, more=2)
    assert found["kl_reference"].item() == pytest.approx(np.mean(plain), rel=1e-12)
    assert found["kl_coef"].item() == pytest.approx(0.3, rel=1e-12)


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits - np.log(np.exp(logits).sum()))


def mean_gradient(estimator: Estimator, logits: list[np.ndarray]) -> np.ndarray:
    """The exact mean, over tokens sampled by the third policy, of the estimate's gradient."""
    new, reference, old = (torch.tensor(x) for x in logits)
    new.requires_grad_()
    new_V, reference_V, old_V = (torch.log_softmax(x, -1) for x in (new, reference, old))
    estimate_V = KL(estimator=estimator).estimate(new_V, reference_V, old_V)
    (old_V.exp() * estimate_V).sum().backward()
    assert new.grad is not None
    return new.grad.numpy()


def slope(of: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    """The derivative by differences."""
    h, unit = 1e-6, np.eye(len(at))
    return np.array([(of(at + h * e) - of(at - h * e)) / (2 * h) for e in unit])


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


def logits(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    new = rng.normal(0, 1, 7)
    return [new, new + rng.normal(0, 0.5, 7), new + rng.normal(0, 0.15, 7)]


def test_k1_in_the_loss_pushes_nowhere_in_the_mean() -> None:
    new, reference, _ = logits(0)
    assert np.abs(mean_gradient("k1", [new, reference, new])).max() < 1e-12


def test_k2_in_the_loss_has_the_gradient_of_the_divergence_on_policy() -> None:
    new, reference, _ = logits(1)
    true = slope(lambda x: divergence(softmax(x), softmax(reference)), new)
    np.testing.assert_allclose(mean_gradient("k2", [new, reference, new]), true, atol=1e-8)


@pytest.mark.parametrize("estimator", ["k3", "low_variance"])
def test_k3_in_the_loss_has_the_gradient_of_the_other_divergence(estimator: Estimator) -> None:
    new, reference, _ = logits(2)
    other = slope(lambda x: divergence(softmax(reference), softmax(x)), new)
    np.testing.assert_allclose(mean_gradient(estimator, [new, reference, new]), other, atol=1e-8)


def test_corrected_k3_has_the_gradient_of_the_divergence_also_off_policy() -> None:
    new, reference, old = logits(3)
    assert (softmax(new) / softmax(old)).max() < 2
    true = slope(lambda x: divergence(softmax(x), softmax(reference)), new)
    found = mean_gradient("corrected_k3", [new, reference, old])
    np.testing.assert_allclose(found, true, atol=1e-8)
    assert np.abs(mean_gradient("k2", [new, reference, old]) - true).max() > 1e-2


@pytest.mark.parametrize("estimator", ["k1", "k3", "low_variance", "corrected_k3"])
def test_the_mean_of_the_estimates_is_the_divergence(estimator: Estimator) -> None:
    new, reference, old = logits(4)
    if estimator != "corrected_k3":
        old = new
    p, q = softmax(new), softmax(reference)
    estimates = KL(estimator=estimator).estimate(
        *(torch.tensor(np.log(softmax(x))) for x in (new, reference, old))
    )
    assert float(softmax(old) @ estimates.numpy()) == pytest.approx(divergence(p, q), rel=1e-10)


def test_tokens_that_the_reference_never_writes_cost_a_bounded_amount() -> None:
    far = torch.tensor([-1000.0, 0.0], requires_grad=True)
    reference, behavior = torch.tensor([0.0, -1000.0]), torch.tensor([-1000.0, -1000.0])
    low = KL(estimator="low_variance").estimate(far, reference)
    assert low.tolist() == [10.0, 10.0]
    corrected = KL(estimator="corrected_k3").estimate(far[1:], reference[1:], behavior[1:])
    assert corrected.item() == pytest.approx(2 * 999)
    corrected.sum().backward()
    assert far.grad is not None
    assert far.grad.isfinite().all()


def charged_rewards(rows: Rows, estimator: str, coef: float) -> np.ndarray:
    """Each sequence's reward less what its trained tokens' divergence costs."""
    less = [
        sum(
            expected(
                estimator,
                float(rows.tokens["proximal"][i][t]),
                float(rows.tokens["reference"][i][t]),
                0,
            )[0]
            for t in np.flatnonzero(mask)
        )
        for i, mask in enumerate(rows.mask)
    ]
    return rows.rows["reward"] - coef * np.array(less)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_variance", "abs"])
def test_in_the_reward_it_is_taken_off_before_the_group_is_compared(estimator: Estimator) -> None:
    rows = ragged(5)
    kl = KL(coef=0.2, estimator=estimator, part_of="reward")
    found = GRPO(kl=kl).prepare(examples_of(rows)).rows["advantage"].numpy()
    rewards = charged_rewards(rows, estimator, 0.2).reshape(2, 3)
    centred = rewards - rewards.mean(1, keepdims=True)
    zscores = centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(found, zscores.flatten(), rtol=1e-10)


def test_in_the_reward_it_is_that_of_the_tokens_that_are_trained_on() -> None:
    rows = ragged(6)
    kl = KL(coef=0.5, estimator="k1", part_of="reward")
    cost = kl.charged(examples_of(rows))
    expected_R = rows.rows["reward"] - charged_rewards(rows, "k1", 0.5)
    np.testing.assert_allclose(examples_of(rows).sum_tokens(cost), expected_R, rtol=1e-10)
    assert not cost[~torch.tensor(np.concatenate(rows.mask))].any()


def test_a_penalty_in_the_reward_is_not_in_the_loss_too() -> None:
    rows = ragged(7)
    examples = examples_of(rows)
    charged = GRPO(kl=KL(coef=0.2, part_of="reward"))
    batch = batch_of(charged.prepare(examples))
    with_kl, without = charged.loss(batch, logprobs_of(rows)), GRPO().loss(batch, logprobs_of(rows))
    assert with_kl.value.item() == without.value.item()
    assert with_kl.metrics["kl_reference"].item() > 0
    assert not KL(coef=0.2).charged(examples).any()
    assert not KL().charged(examples).any()


def test_a_row_without_reward_stays_out_of_the_statistics() -> None:
    rows = ragged(8)
    rewards = rows.rows["reward"].copy()
    rewards[1] = math.nan
    rows = replace(rows, rows={**rows.rows, "reward": rewards})
    found = GRPO(kl=KL(coef=0.1, estimator="k1", part_of="reward")).prepare(examples_of(rows))
    charged = charged_rewards(rows, "k1", 0.1)[[0, 2]]
    zscore = (charged[0] - charged[1]) / 2 / (charged.std(ddof=1) + 1e-6)
    advantages = found.rows["advantage"][:3].tolist()
    assert advantages == pytest.approx([zscore, 0.0, -zscore], rel=1e-10)


def gradient(name: str, kl: dict[str, Any]) -> np.ndarray:
    rows = ragged(4)
    algorithm, new_BT = resolve({name: {"kl": kl}}), logprobs_of(rows)
    algorithm.loss(batch_of(algorithm.prepare(examples_of(rows))), new_BT).value.backward()
    assert new_BT.grad is not None
    return new_BT.grad.numpy()


@pytest.mark.parametrize("name", [n for n in names() if isinstance(resolve(n), PolicyGradient)])
def test_every_policy_gradient_charges_its_rewards_or_says_that_it_does_not(name: str) -> None:
    try:
        charged = gradient(name, {"coef": 0.5, "part_of": "reward"})
    except ConfigError as error:
        assert str(error).endswith("`kl.part_of` can only be `loss`")  # noqa: PT017
    else:
        assert np.abs(charged - gradient(name, {})).max() > 1e-3


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"gigpo": {"kl": {"coef": 0.1, "part_of": "reward"}}},
            "`GiGPO` credits rows by `gigpo`, which reads .* besides the reward and its group; "
            "`kl.part_of` can only be `loss`",
        ),
        (
            {"on_policy_distillation": {"kl": {"coef": 0.1, "part_of": "reward"}}},
            "`OnPolicyDistillation` reads no reward; `kl.part_of` can only be `loss`",
        ),
        ({"grpo": {"kl": {"target": 0.1}}}, "`kl.target` is set and `kl.coef` is 0"),
        (
            {"grpo": {"kl": {"coef": 1, "part_of": "reward", "estimator": "corrected_k3"}}},
            "`corrected_k3` is for the loss",
        ),
        (
            {"grpo": {"kl": {"estimator": "k4"}}},
            "`estimator` of `kl` of `grpo`: input should be 'k1'",
        ),
    ],
)
def test_a_penalty_that_makes_no_sense_is_refused(spec: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(spec)


def test_an_adaptive_coefficient_follows_the_divergence() -> None:
    """Equations of arXiv:1909.08593, section 2.2: at most a fifth of a tenth a step."""
    kl = KL(coef=0.1, target=2.0)
    state: dict[str, float] = {}
    coefs = []
    for measured in (2.0, 2.1, 100.0, 1.0, math.nan, 2.0):
        state = kl.adapt(state, measured)
        coefs.append(kl.coefficient(state))
    # 5 % above the target; far above; half of it; no number; on target
    factors = [1.0, 1 + 0.05 / 10, 1 + 0.2 / 10, 1 - 0.2 / 10, 1.0, 1.0]
    assert coefs == pytest.approx(list(0.1 * np.cumprod(factors)), rel=1e-12)
    assert KL(coef=0.1).adapt({"other": 1.0}, 5.0) == {"other": 1.0}


@pytest.mark.parametrize("part_of", ["loss", "reward"])
def test_a_coefficient_that_was_adapted_is_what_the_next_step_pays(part_of: Any) -> None:
    rows = ragged(9)
    examples = replace(examples_of(rows), state={"kl_coef": 0.7})
    adaptive = GRPO(kl=KL(coef=0.1, target=1.0, part_of=part_of))
    fixed = GRPO(kl=KL(coef=0.7, part_of=part_of))
    losses = [a.loss(batch_of(a.prepare(examples)), logprobs_of(rows)) for a in (adaptive, fixed)]
    assert losses[0].value.item() == losses[1].value.item()
    assert losses[0].metrics["kl_coef"].item() == pytest.approx(0.7, rel=1e-12)


def test_an_adapted_coefficient_comes_back_with_the_checkpoint() -> None:
    algorithm = GRPO(kl=KL(coef=0.1, target=1e-3, horizon=1))
    rows = ragged(2, rows=4)

    def optimization() -> Updater:
        return Updater(
            networks(algorithm),
            algorithm,
            TrainerConfig(learning_rate=1e-2),
            total_steps=9,
            temperature=1.0,
            pad_id=0,
        )

    examples = examples_of(rows)
    stored = {k: v.float() for k, v in examples.tokens.items() if k in ("mask", "logprobs")}
    examples = replace(
        examples,
        tokens={"token_ids": examples.tokens["token_ids"] + 3, **stored},
        rows={k: v.float() for k, v in examples.rows.items()},
    )
    whole, before = optimization(), optimization()
    coefs = [whole.step(examples).metrics["train/kl_coef"] for _ in range(3)]
    for _ in range(2):
        before.step(examples)
    after = optimization()
    after.load(before.state())
    assert after.step(examples).metrics["train/kl_coef"] == coefs[2]
    # the reference has other weights: far above the target
    assert coefs == pytest.approx([0.1, 0.1 * 1.2, 0.1 * 1.2**2], rel=1e-6)


@pytest.mark.parametrize("part_of", ["loss", "reward"])
def test_a_run_keeps_nearer_to_its_reference_with_a_penalty(store: Store, part_of: str) -> None:
    store.append("experiences", written(24))

    def furthest(name: str, coef: float) -> float:
        kl = {"coef": coef, "part_of": part_of}
        settings = {"steps": 8, "batch_size": 3, "max_uses": 9, "learning_rate": 3e-2}
        train(store, offline(name=name, algorithm={"grpo": {"kl": kl}}, trainer=settings))
        where = f"metrics WHERE name = 'train/kl_reference' AND run_id = '{name}' ORDER BY step"
        values = table(store, where, "value")["value"].to_list()
        assert values[0] < 1e-6  # the policy starts as its reference
        return abs(values[-1])

    assert furthest("held", 3.0) < 0.5 * furthest("free", 1e-9)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_the_entropy_bonus_is_taken_off_the_loss(how: Aggregation) -> None:
    rows = ragged(3)
    batch, new_BT = padded(rows, more=1)
    entropy_BT = batch.tokens["entropy"].clone().requires_grad_()
    bonus = GRPO(entropy_coef=0.05, aggregation=how, norm=NORM)
    loss = bonus.loss(batch.with_tokens(entropy=entropy_BT), new_BT)
    plain = GRPO(aggregation=how, norm=NORM).loss(batch, new_BT)
    loss.value.backward()
    value, gradient = 0.0, np.zeros(entropy_BT.shape)
    for i, mask in enumerate(rows.mask):
        scale = 0.05 * rows.weight[i] * share(rows, i, how)
        value += scale * rows.tokens["entropy"][i][mask].sum()
        gradient[i, : len(mask)] = -scale * mask
    assert plain.value.item() - loss.value.item() == pytest.approx(value, rel=1e-10)
    assert entropy_BT.grad is not None
    np.testing.assert_allclose(entropy_BT.grad, gradient, rtol=1e-12)
    trained = np.concatenate([e[m] for e, m in zip(rows.tokens["entropy"], rows.mask, strict=True)])
    assert loss.metrics["entropy"].item() == pytest.approx(trained.mean(), rel=1e-12)


def test_entropy_is_exact_over_the_vocabulary_with_its_gradient() -> None:
    """H = -sum p log p, and dH/dlogit_j = -p_j (log p_j + H)."""
    rng = np.random.default_rng(0)
    for scale in (0.1, 1.0, 8.0):
        logits_MV = torch.tensor(rng.normal(0, scale, (5, 11)), requires_grad=True)
        entropy_M = STATISTICS["entropy"](torch.log_softmax(logits_MV, -1), torch.zeros(5).long())
        entropy_M.sum().backward()
        for m, row in enumerate(logits_MV.detach().numpy()):
            p = softmax(row)
            entropy = -sum(x * math.log(x) for x in p)
            assert entropy_M[m].item() == pytest.approx(entropy, rel=1e-12)
            assert logits_MV.grad is not None
            np.testing.assert_allclose(logits_MV.grad[m], -p * (np.log(p) + entropy), atol=1e-14)


def test_supervised_losses_know_no_penalty() -> None:
    assert "reference" not in SFT().needs
    assert "reference" not in GRPO().needs
    assert "reference" in GRPO(kl=KL(coef=0.1)).needs
