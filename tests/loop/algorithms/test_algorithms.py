"""Losses against the papers' formulas, computed token by token in float64 without torch."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support.losses import (
    NORM,
    assert_loss_is,
    batch_of,
    examples_of,
    logprobs_of,
    padded,
    prepared,
    ragged,
    with_trained,
)
from support.tiny_models import Reinforce

from rlake.loop.algorithms import aggregate, names, resolve
from rlake.loop.algorithms.grpo import GRPO
from rlake.loop.algorithms.sft import SFT
from rlake.loop.losses import Aggregation
from rlake.store.errors import ConfigError

AGGREGATIONS = get_args(Aggregation)


def test_the_random_rows_leave_the_trusted_range_on_both_sides() -> None:
    cases = set()
    for seed in range(5):
        rows = ragged(seed)
        for i, credit in enumerate(rows.advantage):
            ratios = np.exp(rows.new[i] - rows.old[i])[rows.mask[i]]
            cases |= {(bool(credit > 0), int(np.sign(r - 1) * (abs(r - 1) > 0.28))) for r in ratios}
    assert cases == {(up, side) for up in (True, False) for side in (-1, 0, 1)}


def test_grpo_has_the_papers_defaults() -> None:
    assert (GRPO().clip, GRPO().clip_high, GRPO().aggregation) == (0.2, None, "seq-mean-token-mean")


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_grpo_on_policy_takes_the_policy_gradient(how: Aggregation) -> None:
    rows = ragged(1)
    made = GRPO(aggregation=how, norm=NORM)
    credit = -rows.advantage
    same = replace(rows, new=rows.old)
    assert_loss_is(made, same, lambda rows, i, t: (credit[i], credit[i]), how=how)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_sft_loss_and_gradient_are_cross_entropy(how: Aggregation) -> None:
    rows = ragged(2)
    made = SFT(aggregation=how, norm=NORM)
    found = assert_loss_is(made, rows, lambda rows, i, t: (-rows.new[i][t], -1.0), how=how, more=3)
    trained = np.concatenate([n[m] for n, m in zip(rows.new, rows.mask, strict=True)])
    assert found["nll"].item() == pytest.approx(-trained.mean(), rel=1e-12)


HELD_FIXED = {"chord", "cispo", "topr"}
"""Algorithms that hold a weight fixed which depends on the policy: theirs is no slope."""


@pytest.mark.parametrize("name", sorted(set(names()) - HELD_FIXED))
def test_the_gradient_of_every_loss_is_its_slope(name: str) -> None:
    algorithm = resolve(name)
    batch, new_BT = prepared(
        algorithm, 4, spread=0.1
    )  # inside the range, where there are no corners

    def loss(x: torch.Tensor) -> torch.Tensor:
        return algorithm.loss(with_trained(batch, x), x).value

    assert torch.autograd.gradcheck(loss, new_BT, atol=1e-8)


@pytest.mark.parametrize("log_ratio", [100.0, 800.0, -800.0])
def test_a_ratio_beyond_what_float32_holds_leaves_loss_gradient_and_metrics_finite(
    log_ratio: float,
) -> None:
    """0 * inf would be nan: where the advantage is 0, and behind a clip that stops the gradient."""
    for name in names():
        algorithm = resolve(name)
        rows = ragged(0, pairs=algorithm.unit == "pair")
        near, far = ([np.full(len(x), v) for x in rows.new] for v in (-0.01, -abs(log_ratio)))
        old, new = (far, near) if log_ratio > 0 else (near, far)
        rows = replace(
            rows,
            new=new,
            tokens={**rows.tokens, "logprobs": old},
            advantage=np.array([0.0, 1, -1, 0, 1, -1]),
        )
        step = examples_of(rows)
        step = replace(
            step,
            tokens={k: v.float() if v.is_floating_point() else v for k, v in step.tokens.items()},
            rows={k: v.float() for k, v in step.rows.items()},
        )
        new_BT = logprobs_of(rows).detach().float().requires_grad_()
        batch = batch_of(algorithm.prepare(step))
        loss = algorithm.loss(with_trained(batch, new_BT), new_BT)
        loss.value.backward()
        assert new_BT.grad is not None
        assert torch.isfinite(loss.value), name
        assert torch.isfinite(new_BT.grad).all(), name
        wrong = [k for k, v in loss.metrics.items() if not torch.isfinite(v)]
        assert not wrong, (name, wrong)


@pytest.mark.parametrize("spec", [*names(), {"rec": {"regularizer": "k2", "coef": 0.5}}], ids=str)
def test_log_probs_of_tokens_that_are_not_trained_on_may_be_any_number(spec: Any) -> None:
    algorithm = resolve(spec)
    found = []
    for filler in (-1.0, -1e30):
        rows = ragged(1, pairs=algorithm.unit == "pair")
        told = zip(rows.old, rows.mask, strict=True)
        filled = [np.where(mask, old, filler) for old, mask in told]
        step = examples_of(replace(rows, tokens={**rows.tokens, "logprobs": filled}))
        tokens = {k: v.float() if v.is_floating_point() else v for k, v in step.tokens.items()}
        batch = batch_of(algorithm.prepare(replace(step, tokens=tokens)))
        new_BT = logprobs_of(rows).detach().float()
        loss = algorithm.loss(with_trained(batch, new_BT), new_BT)
        found.append([loss.value.item(), *(v.item() for v in loss.metrics.values())])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_ratio_is_cut_off_at_twenty_nats_and_has_no_gradient_beyond() -> None:
    rows = replace(ragged(1), advantage=-np.ones(6), weight=np.ones(6))
    far = [old + (25.0 if i < 3 else -25.0) for i, old in enumerate(rows.old)]
    batch, new_BT = padded(replace(rows, new=far))
    loss = GRPO(aggregation="token-mean").loss(batch, new_BT)
    loss.value.backward()
    near = sum(m.sum() for m in rows.mask[:3]) / rows.num_tokens
    # below the range an answer that is bad is clipped
    assert loss.value.item() == pytest.approx(near * math.exp(20) + (1 - near) * 0.8)
    assert new_BT.grad is not None
    assert not new_BT.grad.any()


def test_grpo_measures_ratio_clipping_divergence_and_entropy() -> None:
    rows = ragged(5)
    batch, new_BT = padded(rows, more=2)
    found = {
        k: v.item() for k, v in GRPO(clip=0.2, clip_high=0.3).loss(batch, new_BT).metrics.items()
    }
    trained = [
        (new, new - old, credit)
        for i, credit in enumerate(rows.advantage)
        for new, old in zip(rows.new[i][rows.mask[i]], rows.old[i][rows.mask[i]], strict=True)
    ]
    ratios = [math.exp(d) for _, d, _ in trained]
    stopped = [r > 1.3 if a > 0 else r < 0.8 for r, (_, _, a) in zip(ratios, trained, strict=True)]
    assert 0 < sum(stopped) < len(stopped)
    mismatches = [
        proximal - old
        for i, mask in enumerate(rows.mask)
        for proximal, old in zip(rows.tokens["proximal"][i][mask], rows.old[i][mask], strict=True)
    ]
    assert found == pytest.approx(
        {
            "ratio": np.mean(ratios),
            "clip_fraction": np.mean(stopped),
            "kl": np.mean([r - 1 - math.log(r) for r in ratios]),
            "entropy": -np.mean([new for new, _, _ in trained]),
            "mismatch_kl": np.mean([math.exp(d) - 1 - d for d in mismatches]),
        },
        rel=1e-12,
    )


def test_metrics_carry_no_gradient() -> None:
    for name in names():
        algorithm = resolve(name)
        batch, new_BT = prepared(algorithm, 0)
        loss = algorithm.loss(with_trained(batch, new_BT), new_BT)
        assert not any(m.requires_grad for m in loss.metrics.values()), name


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_losses_of_parts_of_a_step_add_up_to_the_steps(how: Aggregation) -> None:
    rows = ragged(6)
    batch, values_BT = padded(rows)
    parts = [
        replace(
            batch,
            tokens={name: value[cut] for name, value in batch.tokens.items()},
            rows={name: value[cut] for name, value in batch.rows.items()},
        )
        for cut in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    losses = [
        aggregate(values_BT[cut], part, how, norm=NORM)
        for part, cut in zip(parts, (slice(0, 1), slice(1, 4), slice(4, 6)), strict=True)
    ]
    whole = aggregate(values_BT, batch, how, norm=NORM)
    assert sum(x.item() for x in losses) == pytest.approx(whole.item(), rel=1e-12)


def test_a_row_with_weight_two_counts_as_two_in_sums() -> None:
    rows = ragged(7, rows=1)
    rows = replace(rows, weight=np.array([2.0]))
    batch, values_BT = padded(rows)
    double = aggregate(values_BT, batch, "seq-mean-token-sum").item()
    assert double == pytest.approx(2 * rows.new[0][rows.mask[0]].sum(), rel=1e-12)


def test_every_packaged_algorithm_is_found_by_the_name_of_its_file() -> None:
    assert {"grpo", "sft"} <= set(names())
    for name in names():
        algorithm = resolve(name)
        assert type(algorithm).__module__ == f"rlake.loop.algorithms.{name}"
        assert algorithm.group_size >= 1
        assert (algorithm.advantage() is None) <= (not algorithm.grouped)


def test_parameters_that_are_given_are_set_and_others_keep_their_defaults() -> None:
    assert resolve({"grpo": {"clip": 0.1}}) == GRPO(clip=0.1)
    assert resolve({"grpo": {}}) == resolve("grpo") == GRPO()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("grop", "algorithm `grop` does not exist; did you mean `grpo`?"),
        ({"grpo": {"clipp": 0.1}}, "`grpo` has no parameter `clipp`; did you mean `clip`?"),
        ({"grpo": {}, "sft": {}}, "`algorithm` is `name` or `{name: {parameter: value}}`, got"),
        ("nowhere.at.all:X", "no algorithm `nowhere.at.all:X`"),
        ("support.tiny_models:Nobody", "no algorithm `support.tiny_models:Nobody`"),
        (":X", "no algorithm `:X`; write `package.module:Class`"),
        (".tiny:X", "no algorithm `.tiny:X`; write `package.module:Class`"),
        (
            "support.tiny_models:written",
            "the algorithm `support.tiny_models:written` must be a dataclass",
        ),
    ],
)
def test_what_is_not_an_algorithm_is_refused_with_a_way_out(spec: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(spec)
    assert said in str(caught.value)


def test_an_algorithm_of_a_user_is_found_by_module_and_class() -> None:
    assert resolve({"support.tiny_models:Reinforce": {"scale": 2.0}}) == Reinforce(scale=2.0)


@dataclass(frozen=True, kw_only=True)
class Needy(Reinforce):
    """An algorithm with a parameter that has no default, and one that may be true."""

    strength: float
    often: bool = False


NEEDY = f"{__name__}:Needy"


def test_text_that_is_a_number_is_taken_as_yaml_reads_it() -> None:
    assert resolve({"grpo": {"clip": "1e-1", "group_size": "4"}}) == GRPO(clip=0.1, group_size=4)
    assert resolve({"grpo": {"clip_high": None}}) == GRPO()


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        (
            "grpo",
            {"aggregation": "token_mean"},
            "`aggregation` of `grpo`: input should be 'token-m",
        ),
        ("grpo", {"group_size": "abc"}, "`group_size` of `grpo`: input should be a valid integer"),
        (
            "grpo",
            {"group_size": 0},
            "`group_size` of `grpo`: input should be greater than or equal",
        ),
        (
            "grpo",
            {"group_size": True},
            "`group_size` of `grpo`: input should be a number, got True",
        ),
        ("grpo", {"clip": -5}, "`clip` of `grpo`: input should be greater than 0, got -5"),
        ("grpo", {"clip": math.inf}, "`clip` of `grpo`: input should be a finite number, got inf"),
        ("grpo", {"clip": math.nan}, "`clip` of `grpo`: input should be"),
        ("grpo", {"clip_high": 0}, "`clip_high` of `grpo`: input should be greater than 0, got 0"),
        ("sft", {"norm": 0}, "`norm` of `sft`: input should be greater than 0, got 0"),
        (
            "support.tiny_models:Reinforce",
            {"scale": "big"},
            "`scale` of `support.tiny_models:Reinforce`: input should be a valid",
        ),
        (NEEDY, {}, f"`strength` of `{NEEDY}` is missing; it has no default"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_place(
    name: str, params: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({name: params})
    assert str(caught.value).startswith(f"parameter {said}")
    assert "\n" not in str(caught.value)


def test_an_aggregation_that_divides_needs_to_know_by_what() -> None:
    for name in names():
        if "aggregation" not in {f.name for f in fields(resolve(name))}:  # type: ignore[arg-type]
            continue
        with pytest.raises(ConfigError, match=f"`{name}` with aggregation .* needs a `norm`"):
            resolve({name: {"aggregation": "seq-mean-token-sum-norm"}})


def test_true_is_taken_where_it_is_wanted() -> None:
    made = resolve({NEEDY: {"strength": 1, "often": True}})
    assert isinstance(made, Needy)
    assert (made.strength, made.often) == (1.0, True)


@pytest.mark.parametrize("how", ["token_mean", "seq-mean-token-sum-norm"])
def test_losses_are_never_added_up_in_a_way_that_was_not_asked_for(how: Any) -> None:
    batch, values_BT = padded(ragged(0))
    with pytest.raises(ValueError, match=f"aggregation `{how}` with norm None does not exist"):
        aggregate(values_BT, batch, how)
