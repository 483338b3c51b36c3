"""What a run needs is known before it begins, and what does not fit is said with the way out."""

import logging
from typing import Any

import pytest
import torch
from support.tiny_models import config, tiny
from torch import Tensor

from rlake.loop.algorithms import resolve
from rlake.loop.config import LoraConfig, RunConfig
from rlake.loop.models.lora import adapter_part, add_adapter
from rlake.loop.models.token_logprobs import Scorer
from rlake.loop.trainer import memory
from rlake.loop.trainer.memory import check_memory, estimate, skeleton
from rlake.store.errors import ConfigError

SPEC: dict[str, Any] = {"hidden_size": 64, "layers": 3, "heads": 4, "max_length": 512}


def settings(*, model: Any = None, **trainer: Any) -> RunConfig:
    spec = {"from_scratch": SPEC, **(model or {})}
    return config(model=spec, trainer={"micro_batch_tokens": 400, **trainer}, algorithm="sft")


def by_name(given: RunConfig) -> dict[str, int]:
    return {part.name: part.bytes for part in estimate(given).parts}


def kept_by_a_pass(precision: str) -> int:
    """The bytes that a real pass of the product keeps for the backward pass."""
    model, _ = tiny(**SPEC)
    scorer = Scorer(model, packing=True)
    own = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    )
    half = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16")
    with hooks, half:
        scorer(torch.full((4, 100), 3), torch.ones(4, 100))
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_are_what_a_real_pass_keeps(precision: str) -> None:
    estimated = by_name(settings(precision=precision))["activations"]
    assert estimated == pytest.approx(kept_by_a_pass(precision), rel=0.1)


def test_weights_gradients_and_moments_are_counted() -> None:
    model, _ = tiny(**{**SPEC, "alphabet": settings().model.from_scratch.alphabet})  # type: ignore[union-attr]
    held = 4 * sum(p.numel() for p in model.parameters())
    found = by_name(settings())
    assert (found["weights in float32"], found["gradients"]) == (held, held)
    assert found["state of adamw"] == 2 * held
    assert found["engine's weights"] == held
    assert by_name(settings(optimizer="adafactor"))["state of adafactor"] == 0
    assert by_name(settings(model={"dtype": "bfloat16"}))["engine's weights"] == held // 2


@pytest.mark.parametrize("targets", [None, ("q_proj", "up_proj")])
def test_only_an_adapter_is_trained(targets: tuple[str, ...] | None) -> None:
    lora = LoraConfig(rank=4, targets=targets)
    model, _ = tiny(**SPEC)
    add_adapter(model, lora, seed=0)
    trained = 4 * sum(value.numel() for value in adapter_part(model.state_dict()).values())
    found = by_name(settings(model={"lora": lora.model_dump()}))
    assert found["gradients"] == trained
    assert found["state of adamw"] == 2 * trained


def test_checkpointing_and_offload_move_activations() -> None:
    found = by_name(settings(gradient_checkpointing=True))
    assert found["activations between layers"] == 4 * 400 * 64 * 3
    offloaded = estimate(settings(offload={"optimizer": True, "activations": True}))
    on_cpu = {part.name for part in offloaded.parts if part.on_cpu}
    assert on_cpu == {"state of adamw", "activations"}


def test_a_skeleton_has_no_numbers() -> None:
    assert {p.device.type for p in skeleton(settings().model).parameters()} == {"meta"}


def test_what_cannot_fit_is_refused_before_anything_is_loaded() -> None:
    huge = {"from_scratch": {**SPEC, "hidden_size": 2**16, "layers": 4, "heads": 64}}
    given = settings(model=huge)
    message = r"needs at least \d+\.\d\d GiB on `cpu`, which has .* GiB; the largest part is"
    with pytest.raises(ConfigError, match=message):
        check_memory(given, resolve(given.algorithm))


def test_what_may_not_fit_is_warned_of_with_what_to_change(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SMALL", 0)
    given = settings(micro_batch_tokens=2**30)
    with caplog.at_level(logging.WARNING):
        check_memory(given, resolve(given.algorithm))
    [said] = caplog.messages
    assert "the largest part is `activations`" in said
    assert "change trainer.gradient_checkpointing, trainer.micro_batch_tokens" in said
    check_memory(settings(), resolve("sft"))
    assert len(caplog.messages) == 1
