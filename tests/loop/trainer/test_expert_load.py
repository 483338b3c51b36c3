"""Steps of a mixture of experts: the same however they are cut, and balanced as transformers does.

`transformers.models.qwen3_moe.modeling_qwen3_moe.load_balancing_loss_func` computes the loss of one
layer from logits that transformers records by itself.
"""

from typing import Any

import pytest
import torch
from support.experts import SHAPE, mixture, networks, routed_rows
from support.tiny_models import gradients
from support.updates import rows_of_a_step
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rlake.loop.algorithms import resolve
from rlake.loop.config import LoraConfig, TrainerConfig
from rlake.loop.losses.batch import Examples
from rlake.loop.models.lora import add_adapter
from rlake.loop.trainer.step import StepResult, Updater

PENALIZED = {"grpo": {"kl": {"coef": 0.1}, "entropy_coef": 0.01}}


def taken(
    rows: Examples, algorithm: Any = "sft", *, adapter: bool = False, **settings: Any
) -> tuple[Tensor, StepResult]:
    """Return the gradient and the metrics of a step."""
    model = mixture()
    given = TrainerConfig(learning_rate=1e-2, max_grad_norm=1e9, precision="float32", **settings)
    made = networks(model, given, replay="routed_experts" in rows.tokens)
    if adapter:
        add_adapter(model, LoraConfig(rank=4, targets=("q_proj",)), seed=0)
    elif "reference" in resolve(algorithm).needs:
        made.reference = mixture().requires_grad_(requires_grad=False)
    found = Updater(made, resolve(algorithm), given, total_steps=3, pad_id=0).step(rows)
    return gradients(model), found


def assert_near(one: Tensor, other: Tensor) -> None:
    assert float((one - other).abs().max()) <= 2e-5 * float(one.abs().max())


CUT: dict[str, dict[str, Any]] = {
    "in parts": {"micro_batch_tokens": 40},
    "alone": {"micro_batch_tokens": 1},
    "padded": {"packing": False},
    "padded, in parts": {"packing": False, "micro_batch_tokens": 60},
    "checkpointed": {"gradient_checkpointing": True, "micro_batch_tokens": 40},
}


@pytest.mark.parametrize("how", CUT)
@pytest.mark.parametrize("coef", [0.0, 0.5])
def test_a_step_with_replayed_experts_does_not_depend_on_how_it_is_cut(
    how: str, coef: float
) -> None:
    given: dict[str, Any] = {"router_aux_loss_coef": coef}
    gradient, whole = taken(routed_rows(), PENALIZED, **given)
    other, found = taken(routed_rows(), PENALIZED, **given, **CUT[how])
    assert_near(gradient, other)
    for name in ("loss", "kl_reference", "router_load_max", "router_mismatch"):
        value = whole.metrics[f"train/{name}"]
        assert found.metrics[f"train/{name}"] == pytest.approx(value, rel=1e-4, abs=1e-6)
    assert whole.metrics["train/router_mismatch"] > 0.3  # they were drawn at random


def test_the_gradient_is_that_of_the_replayed_experts() -> None:
    replayed, _ = taken(routed_rows())
    free, _ = taken(rows_of_a_step())
    others, _ = taken(routed_rows(seed=1))
    assert float((replayed - free).norm()) > 0.1 * float(free.norm())
    assert float((replayed - others).norm()) > 0.1 * float(free.norm())


@pytest.mark.parametrize("adapter", [False, True])
def test_a_reference_with_the_policys_weights_is_not_apart_from_it(*, adapter: bool) -> None:
    _, found = taken(routed_rows(), PENALIZED, adapter=adapter)
    assert found.metrics["train/kl_reference"] == pytest.approx(0.0, abs=1e-9)
    assert found.metrics["train/router_mismatch"] > 0.3


def expected(rows: Examples, coef: float) -> tuple[Tensor, float]:
    """Return the gradient of SFT with the balance, and the balance, by transformers' functions."""
    model = mixture().train()
    masks = [rows.tokens["mask"][rows.spots([i])] for i in range(len(rows))]
    reads = [int(mask.nonzero().max()) for mask in masks]
    batch = rows.padded(range(len(rows)), totals=rows.totals, pad_id=0)
    width = max(reads)
    ids_BT, is_read_BT = batch.token_ids_BT, torch.arange(width) < torch.tensor(reads)[:, None]
    found = model(input_ids=ids_BT[:, :width], output_router_logits=True)
    next_BT1 = ids_BT[:, 1 : width + 1, None]
    logprobs_BT = found.logits.log_softmax(-1).gather(-1, next_BT1)[..., 0]
    nll = -(logprobs_BT * batch.mask_BT[:, 1 : width + 1])
    _, top_k, experts = SHAPE
    layers: Any = [
        load_balancing_loss_func((one,), experts, top_k, is_read_BT.long())
        for one in found.router_logits
    ]
    balance = torch.stack(layers).mean()
    loss = (nll.sum(1) * batch.weight_B).sum() / batch.totals.tokens
    (loss + coef * balance).backward()
    return gradients(model), float(balance.detach())


@pytest.mark.parametrize("how", [{}, *CUT.values()])
def test_the_balance_is_transformers_own_over_all_tokens_of_the_step(how: dict[str, Any]) -> None:
    rows = rows_of_a_step()
    rows = rows.with_rows(temperature=torch.ones(len(rows)))
    plain, _ = taken(rows)
    found, result = taken(rows, router_aux_loss_coef=0.5, **how)
    assert float((found - plain).norm()) > 0.01 * float(plain.norm())
    gradient, balance = expected(rows, 0.5)
    assert result.metrics["train/router_aux_loss"] == pytest.approx(balance, rel=1e-5)
    assert_near(gradient, found)
