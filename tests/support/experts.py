"""Tiny mixtures of experts, rows that they routed, and passes that replay them."""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support.tiny_models import tiny
from support.updates import rows_of_a_step
from torch import Tensor
from transformers import PreTrainedModel

from rlake.loop.config import TrainerConfig
from rlake.loop.inference.engine import Request
from rlake.loop.inference.policy import Sampling
from rlake.loop.inference.transformers_engine.engine import TransformersEngine
from rlake.loop.losses.batch import Examples
from rlake.loop.models.load import as_type
from rlake.loop.models.routers import prepared
from rlake.loop.models.token_logprobs import Scorer
from rlake.loop.trainer.networks import Networks, checkpoint_activations

SHAPE = (2, 2, 6)
"""Layers, experts for a token, and experts."""


def mixture(**spec: Any) -> PreTrainedModel:
    """Make a Qwen3-MoE whose answers vary."""
    layers, top_k, experts = SHAPE
    given = {"layers": layers, "experts": experts, "experts_per_token": top_k}
    return tiny(**given | {"intermediate_size": 12} | spec)[0]


def routed_rows(*, seed: int = 0, longer: int = 0) -> Examples:
    """Rows of a step with random experts, which no router would choose, and some unknown ones."""
    rows = rows_of_a_step(longer=longer)
    layers, top_k, experts = SHAPE
    rng = np.random.default_rng(seed)
    count = int(rows.lengths.sum())
    drawn = [[rng.permutation(experts)[:top_k] for _ in range(layers)] for _ in range(count)]
    chosen_NX = torch.tensor(np.array(drawn)).flatten(1).int()
    chosen_NX[rows.starts[1:] - 1] = -1
    chosen_NX[::7] = -1
    return rows.with_tokens(routed_experts=chosen_NX)


def networks(model: PreTrainedModel, settings: TrainerConfig, *, replay: bool = True) -> Networks:
    """Return the networks of a run whose routers are replayed, or only balanced."""
    made = Networks(model, packing=None if settings.packing == "auto" else settings.packing)
    made.routing = prepared(model)
    made.routing.is_replay = replay
    if settings.gradient_checkpointing:
        checkpoint_activations(model)
    return made


@dataclass(frozen=True)
class Gap:
    """Mean absolute differences of an engine's and a trainer's log-probs, in nats."""

    replayed: float
    free: float
    mismatch: float
    """The share of the engine's experts that the trainer's routers would not have chosen."""


def gap(dtype: str = "bfloat16", *, seed: int = 0, answers: int = 16, **spec: Any) -> Gap:
    """Sample with an engine, and score its tokens in float32 with and without its experts."""
    given: dict[str, Any] = {"max_length": 64, "seed": seed, **spec}
    (own, tokenizer), (model, _) = tiny(**given), tiny(**given)
    engine = TransformersEngine(as_type(own, dtype), tokenizer, record_experts=True)
    rng = np.random.default_rng(seed)
    asked = [
        Request(
            prompt_ids=rng.integers(3, 15, 8).tolist(),
            sampling=Sampling(max_tokens=48, seed=i, ignore_eos=True),
        )
        for i in range(answers)
    ]

    async def answered() -> list[Any]:
        found = await engine.complete(asked)
        await engine.close()
        return found

    found = asyncio.run(answered())
    token_ids_BT = torch.tensor(
        [[*a.prompt_ids, *b.token_ids] for a, b in zip(asked, found, strict=True)]
    )
    logprobs_BT = torch.tensor([[0.0] * 8 + list(b.logprobs) for b in found])
    routed_BTX = torch.tensor([[*b.routed_experts, b.routed_experts[0]] for b in found])
    scorer = Scorer(model, packing=None)
    scorer.routing = routing = prepared(model)
    routing.reset(model.device)
    mask_BT = torch.ones_like(token_ids_BT)
    mask_BT[:, :8] = 0

    @torch.no_grad()
    def difference(experts: Tensor | None) -> float:
        made = scorer(token_ids_BT, mask_BT, routed_experts_BTX=experts)["logprobs"]
        return float((made - logprobs_BT).abs().sum() / mask_BT.sum())

    replayed = difference(routed_BTX)
    mismatch = float(routing.sums["differing"] / routing.sums["load"].sum())
    return Gap(replayed, difference(None), mismatch)
