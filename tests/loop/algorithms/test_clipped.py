"""Clipped policy gradients against the papers' formulas, token by token in float64."""

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from support.losses import (
    NORM,
    Rows,
    apart,
    assert_loss_is,
    batch_of,
    clipped,
    examples_of,
    logprobs_of,
    ragged,
)

from rlake.loop.algorithms import resolve
from rlake.loop.algorithms.dapo import DAPO
from rlake.loop.algorithms.dr_grpo import DrGRPO
from rlake.loop.algorithms.grpo import GRPO
from rlake.loop.algorithms.gspo import GSPO
from rlake.loop.algorithms.m2po import M2PO
from rlake.loop.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from rlake.loop.algorithms.sppo import SPPO
from rlake.loop.losses import KL, Aggregation, Correction

AGGREGATIONS = get_args(Aggregation)
SEEDS = range(4)


def mean_apart(rows: Rows, i: int) -> float:
    """Mean log-ratio of a row's trained tokens."""
    return float((rows.new[i] - rows.old[i])[rows.mask[i]].mean())


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize(
    ("name", "params", "high"),
    [
        ("grpo", {}, 0.2),
        ("grpo", {"clip_high": 0.28}, 0.28),
        ("dr_grpo", {}, 0.2),
        ("dapo", {}, 0.28),
    ],
)
def test_grpo_and_its_kin_have_the_papers_loss_each_added_up_and_clipped_in_its_way(
    name: str, params: dict[str, float], high: float, how: Aggregation
) -> None:
    """Equation 3 of arXiv:2402.03300 with beta = 0."""
    made = resolve({name: {"aggregation": how, "norm": NORM, **params}})

    def token(rows: Rows, i: int, t: int) -> tuple[float, float]:
        return clipped(math.exp(apart(rows, i, t)), rows.advantage[i], 0.2, high)

    for seed in range(5):
        assert_loss_is(made, ragged(seed), token, how=how, more=seed)


def test_dr_grpo_and_dapo_have_their_papers_defaults() -> None:
    assert (DrGRPO().aggregation, DrGRPO().credit) == ("seq-mean-token-sum", "group_centered")
    assert (DAPO().aggregation, DAPO().group_size) == ("token-mean", 16)
    assert (DAPO().clip, DAPO().clip_high) == (0.2, 0.28)
    assert DAPO().credit == GRPO().credit == "group_zscore"


def test_dual_clip_bounds_the_loss_of_bad_answers_whose_tokens_became_likely() -> None:
    """arXiv:1912.09729: max(min(r A, clip(r) A), c A) where A < 0."""

    def token(rows: Rows, i: int, t: int) -> tuple[float, float]:
        credit = rows.advantage[i]
        loss, slope = clipped(math.exp(apart(rows, i, t)), credit, 0.2, 0.2)
        return (-2.0 * credit, 0.0) if credit < 0 and loss > -2.0 * credit else (loss, slope)

    stopped = 0
    for seed in SEEDS:
        rows = ragged(seed, spread=1.5)
        found = assert_loss_is(
            GRPO(dual_clip=2.0, aggregation="token-mean"), rows, token, how="token-mean"
        )
        out = [
            math.exp(rows.new[i][t] - rows.old[i][t]) > 2.0
            for i in np.flatnonzero(rows.advantage < 0)
            for t in np.flatnonzero(rows.mask[i])
        ]
        assert found["dual_clip_fraction"].item() == pytest.approx(sum(out) / rows.num_tokens)
        stopped += sum(out)
    assert stopped > 3


def test_a_sequence_mask_leaves_out_bad_answers_that_became_unlikely() -> None:
    """arXiv:2512.02556, section 3.1; the losses are divided by as much as without it."""

    def is_masked(rows: Rows, i: int) -> bool:
        return bool(-mean_apart(rows, i) > 0.1 and rows.advantage[i] < 0)

    def token(rows: Rows, i: int, t: int) -> tuple[float, float]:
        if is_masked(rows, i):
            return 0.0, 0.0
        return clipped(math.exp(apart(rows, i, t)), rows.advantage[i], 0.2, 0.2)

    cases = set()
    for seed in range(8):
        rows = ragged(seed)
        is_out = [is_masked(rows, i) for i in range(len(rows))]
        made = GRPO(sequence_mask=0.1, aggregation="token-mean")
        found = assert_loss_is(made, rows, token, how="token-mean", more=2)
        tokens = sum(m.sum() for m, out in zip(rows.mask, is_out, strict=True) if out)
        assert found["sequence_mask_fraction"].item() == pytest.approx(tokens / rows.num_tokens)
        cases |= {(out, bool(rows.advantage[i] < 0)) for i, out in enumerate(is_out)}
    assert cases == {(False, False), (False, True), (True, True)}


def test_a_sequence_mask_looks_at_who_wrote_an_answer_also_where_ratios_do_not() -> None:
    """Of arXiv:2512.02556: pi_old is what the engine sampled with, so that its mismatch counts."""
    correction = Correction(decoupled=True, weights="none")
    masks = []
    for seed in range(4):
        step = examples_of(ragged(seed))
        found = [
            made.loss(batch_of(made.prepare(step)), logprobs_of(ragged(seed)))
            for made in (GRPO(sequence_mask=0.1), GRPO(sequence_mask=0.1, correction=correction))
        ]
        one, other = (loss.metrics["sequence_mask_fraction"].item() for loss in found)
        assert one == other
        masks.append(one)
    assert min(masks) < max(masks)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_gspo_clips_by_the_ratio_of_the_whole_answer(how: Aggregation) -> None:
    """arXiv:2507.18071; the slope along a token is an equal part of it."""

    def token(rows: Rows, i: int, t: int) -> tuple[float, float]:
        del t
        return clipped(math.exp(mean_apart(rows, i)), rows.advantage[i], 0.03, 0.04)

    made = GSPO(clip=0.03, clip_high=0.04, aggregation=how, norm=NORM)
    cases = set()
    for seed in range(6):
        rows = ragged(seed, spread=0.2)
        assert_loss_is(made, rows, token, how=how, more=seed)
        for i, credit in enumerate(rows.advantage):
            place = int(np.digitize(math.exp(mean_apart(rows, i)), [0.97, 1.04]))
            cases.add((bool(credit > 0), place))
    assert len(cases) == 6


def test_gspo_of_tokens_is_the_gradient_of_its_formula_for_sequences() -> None:
    rows = ragged(2, spread=0.01)
    batch = batch_of(examples_of(rows))
    one_BT, other_BT = logprobs_of(rows), logprobs_of(rows)
    GSPO().loss(batch, one_BT).value.backward()
    ratio_B = batch.mean_tokens(other_BT - batch.logprobs_BT).exp()
    credit_B = batch.rows["advantage"]
    gain_B = torch.minimum(ratio_B * credit_B, ratio_B.clamp(1 - 3e-4, 1 + 4e-4) * credit_B)
    (-(gain_B * batch.weight_B).mean()).backward()
    assert one_BT.grad is not None
    assert other_BT.grad is not None
    torch.testing.assert_close(one_BT.grad, other_BT.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_sppo_clips_the_log_of_the_ratio_on_both_sides(how: Aggregation) -> None:
    """arXiv:2108.05828: maximize A log(clip(r, 1 / (1 + epsilon), 1 + epsilon))."""

    def token(rows: Rows, i: int, t: int) -> tuple[float, float]:
        credit, ratio = rows.advantage[i], math.exp(apart(rows, i, t))
        bounded = min(max(ratio, 1 / 1.3), 1.3)
        return -credit * math.log(bounded), -credit if bounded == ratio else 0.0

    outside = 0
    for seed in SEEDS:
        found = assert_loss_is(SPPO(aggregation=how, norm=NORM), ragged(seed), token, how=how)
        outside += found["clip_fraction"].item() > 0.2
    assert outside


def kept_by_m2po(rows: Rows, threshold: float) -> dict[tuple[int, int], bool]:
    """arXiv:2510.01161: leave out the largest until the mean is small enough."""
    pushed = {}
    for i, credit in enumerate(rows.advantage):
        for t in np.flatnonzero(rows.mask[i]):
            before = rows.tokens["proximal"][i][t] - rows.old[i][t]
            if (credit > 0 and before > 0) or (credit < 0 and before < 0):
                pushed[i, int(t)] = before**2
    left = dict(pushed)
    while left and np.mean(list(left.values())) > threshold:
        left.pop(max(left, key=lambda at: left[at]))
    return {at: at in left for at in pushed}


@pytest.mark.parametrize("threshold", [0.0, 0.04, 0.2, 100.0])
def test_m2po_leaves_out_the_furthest_of_the_tokens_that_would_go_further(threshold: float) -> None:
    is_kept: list[bool] = []
    for seed in SEEDS:
        rows = ragged(seed)
        kept = kept_by_m2po(rows, threshold)
        is_kept.extend(kept.values())

        def token(
            rows: Rows, i: int, t: int, kept: dict[tuple[int, int], bool] = kept
        ) -> tuple[float, float]:
            if not kept.get((i, t), True):
                return 0.0, 0.0
            loss = -math.exp(apart(rows, i, t)) * rows.advantage[i]
            return loss, loss

        found = assert_loss_is(M2PO(threshold=threshold), rows, token, how="token-mean")
        num_out = sum(not one for one in kept.values())
        assert found["kept_fraction"].item() == pytest.approx(1 - num_out / rows.num_tokens)
    assert any(is_kept) == (threshold > 0)
    assert all(is_kept) == (threshold == 100.0)


def test_m2po_treats_equal_tokens_alike_so_that_their_order_does_not_matter() -> None:
    rows = ragged(0, rows=2)
    old = [np.zeros(len(x)) for x in rows.new]
    near = [np.full(len(x), 0.3) for x in rows.new]
    rows = replace(rows, advantage=np.ones(2), tokens={"logprobs": old, "proximal": near})
    kept = M2PO(threshold=0.05).prepare(examples_of(rows)).tokens["kept"]
    assert not kept[torch.tensor(np.concatenate(rows.mask))].any()


def returns(rows: Rows, discount: float, costs: list[np.ndarray]) -> list[np.ndarray]:
    """arXiv:2501.03262: sums of later rewards, of trained tokens only."""
    out = []
    for i, mask in enumerate(rows.mask):
        at = np.flatnonzero(mask)
        rewards = [-costs[i][t] for t in at]
        rewards[-1] += rows.advantage[i]
        out.append(np.zeros(len(mask)))
        for j, t in enumerate(at):
            later = [discount ** (k - j) * r for k, r in enumerate(rewards) if k >= j]
            out[i][t] = sum(later)
    return out


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("coef", [0.0, 0.05])
def test_reinforce_plus_plus_normalizes_returns_of_tokens_over_the_step(
    discount: float, coef: float
) -> None:
    kl = KL(coef=coef, estimator="k1", part_of="reward")
    made = ReinforcePlusPlus(discount=discount, kl=kl)
    for seed in SEEDS:
        rows = ragged(seed)
        tokens = {k: v for k, v in rows.tokens.items() if k != "token_rewards"}
        rows = replace(rows, tokens=tokens)
        pairs = zip(tokens["proximal"], tokens["reference"], strict=True)
        told = returns(rows, discount, [coef * (before - ref) for before, ref in pairs])
        trained = np.concatenate([r[m] for r, m in zip(told, rows.mask, strict=True)])
        mean, spread = trained.mean(), trained.std()

        credits = [(one - mean) / (spread + 1e-8) for one in told]

        def token(
            rows: Rows, i: int, t: int, credits: list[np.ndarray] = credits
        ) -> tuple[float, float]:
            credit = credits[i][t]
            return clipped(math.exp(apart(rows, i, t)), credit, 0.2, 0.2)

        found = assert_loss_is(made, rows, token, how="token-mean", more=seed)
        assert found["return"].item() == pytest.approx(mean, rel=1e-9)


def test_reinforce_plus_plus_with_a_baseline_draws_groups_and_without_one_rows() -> None:
    assert not ReinforcePlusPlus().grouped
    assert ReinforcePlusPlus().advantage().name == "reinforce"
    with_baseline = ReinforcePlusPlus(baseline="group_mean")
    assert with_baseline.grouped
    assert with_baseline.advantage().name == "group_centered"


def test_a_group_without_advantages_is_replaced_by_a_copy_of_another() -> None:
    """Polaris: the loss is that of a step in which the copy stands in its place."""
    algorithm = GRPO(repeat_groups=True)
    for seed in SEEDS:
        rows = ragged(seed, rows=9)
        rows.advantage[:3] = 0.0
        made = algorithm.prepare(examples_of(rows)).rows["weight"].numpy() / rows.weight
        assert made[:3].tolist() == [0.0] * 3
        chosen = 1 if made[3] == 2.0 else 2
        assert made[3:].tolist() == [2.0 if i // 3 == chosen else 1.0 for i in range(3, 9)]
        places = [*range(3 * chosen, 3 * chosen + 3), *range(3, 9)]
        copied = replace(
            rows,
            new=[rows.new[i] for i in places],
            mask=[rows.mask[i] for i in places],
            advantage=rows.advantage[places],
            weight=rows.weight[places],
            tokens={name: [v[i] for i in places] for name, v in rows.tokens.items()},
            rows={name: v[places] for name, v in rows.rows.items()},
        )
        found, told = (
            made.loss(batch_of(made.prepare(examples_of(some))), logprobs_of(some)).value.item()
            for made, some in ((algorithm, rows), (GRPO(), copied))
        )
        assert found == pytest.approx(told, rel=1e-12)


def test_a_step_in_which_no_group_or_every_group_has_advantages_is_left_as_it_is() -> None:
    rows = ragged(0, rows=6)
    algorithm = GRPO(repeat_groups=True)
    weight = algorithm.prepare(examples_of(rows)).rows["weight"]
    np.testing.assert_array_equal(weight.numpy(), rows.weight)
    rows.advantage[:] = 0.0
    weight = algorithm.prepare(examples_of(rows)).rows["weight"]
    np.testing.assert_array_equal(weight.numpy(), rows.weight)
