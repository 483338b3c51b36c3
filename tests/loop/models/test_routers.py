"""Routers choose the experts that they are told, with their own weights and gradients."""

from typing import Any

import pytest
import torch
from support.experts import SHAPE, gap, mixture
from support.tiny_models import tiny
from torch import Tensor
from torch.nn import functional
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from rlake.loop.models.routers import of, prepared
from rlake.store.errors import ConfigError

DEEP: dict[str, Any] = {"layers": 12, "experts": 64, "experts_per_token": 1, "init_std": 0.2}
"""Twelve layers that each send a token to one expert of 64, where a wrong one changes most."""


def by_hand(block: Any, hidden_PD: Tensor, index_PK: Tensor) -> Tensor:
    """What the experts make of each position, one by one, in the precision of the input."""
    gate, experts = block.gate, block.experts
    made = []
    for h_D, index_K in zip(hidden_PD, index_PK, strict=True):
        p_E = (gate.weight @ h_D).exp()
        weight_K = p_E[index_K] / p_E[index_K].sum()
        total = torch.zeros_like(h_D)
        for weight, e in zip(weight_K, index_K.tolist(), strict=True):
            into, up = (experts.gate_up_proj[e] @ h_D).chunk(2)
            total = total + weight * (experts.down_proj[e] @ (functional.silu(into) * up))
        made.append(total)
    return torch.stack(made)


def test_replayed_experts_compute_with_the_weights_of_the_routers_own_gate() -> None:
    model = mixture().double()
    model.set_experts_implementation("eager")  # the grouped product knows no float64
    routing = prepared(model)
    layers, top_k, experts = SHAPE
    generator = torch.Generator().manual_seed(1)
    hidden_PD = torch.randn(9, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    order_PE = torch.rand(9, experts, generator=generator).argsort(1)
    index_PX = order_PE[:, : layers * top_k]  # of both layers, and all different
    routing.begin(index_PX, None)
    decoder: Any = model.get_decoder()
    block = decoder.layers[1].mlp
    weights = [hidden_PD, block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
    out_PD = torch.randn(9, 16, dtype=torch.float64, generator=generator)
    told = [
        [made_PD.detach(), *torch.autograd.grad((made_PD * out_PD).sum(), weights)]
        for made_PD in (block(hidden_PD[None])[0], by_hand(block, hidden_PD, index_PX[:, top_k:]))
    ]
    for ours, expected in zip(*told, strict=True):
        # the gate's own softmax is in float32
        assert float((ours - expected).abs().max()) < 1e-6
        assert float(expected.abs().max()) > 1e-3


def test_own_choices_that_are_replayed_change_nothing_and_others_do() -> None:
    model = mixture()
    routing = prepared(model)
    routing.chosen = {}
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9]])

    @torch.no_grad()
    def logits(replayed: Tensor | None) -> Tensor:
        routing.begin(replayed, None)
        return model(input_ids=ids).logits

    plain = logits(None)
    own_PX = routing.taken()
    assert own_PX.shape == (7, routing.num_layers * routing.top_k)
    assert torch.equal(logits(own_PX), plain)
    other_PX = (own_PX + 1) % routing.num_experts
    assert not torch.allclose(logits(other_PX), plain, atol=1e-3)
    assert torch.equal(routing.taken(), other_PX)
    other_PX[3:] = -1  # unknown ones are chosen by the routers
    partly = logits(other_PX)
    assert not torch.allclose(partly, plain, atol=1e-3)
    assert torch.equal(logits(torch.full_like(own_PX, -1)), plain)


SMALL: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
}
LATENT |= {"v_head_dim": 8, "moe_intermediate_size": 8, "n_routed_experts": 8, "n_group": 4}
LATENT |= {"topk_group": 2, "first_k_dense_replace": 1}
FAMILIES = {
    "Mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL)),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**SMALL, head_dim=8)),
    "Granite": lambda: GraniteMoeForCausalLM(GraniteMoeConfig(**SMALL)),
    "DeepSeek-V3, by groups": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(**{**SMALL, **LATENT})
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_of_other_families_replay_too(family: str) -> None:
    made: Any = FAMILIES[family]
    model: PreTrainedModel = made().eval()
    layers = 1 if "DeepSeek" in family else 2  # its first layer is dense
    assert of(model) == (layers, 2, 8)
    routing = prepared(model)
    assert prepared(model) is routing
    routing.chosen = {}
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        routing.begin(None, None)
        plain = model(input_ids=ids).logits
        own_PX = routing.taken()
        routing.begin(own_PX, None)
        assert torch.equal(model(input_ids=ids).logits, plain)
        routing.begin((own_PX + 1) % 8, None)
        assert not torch.equal(model(input_ids=ids).logits, plain)


def test_a_model_without_routers_is_refused() -> None:
    dense = tiny()[0]
    assert of(dense) is None
    with pytest.raises(ConfigError, match="`Qwen3ForCausalLM` has no routers whose choices"):
        prepared(dense)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_replay_brings_an_engine_in_bfloat16_ten_times_nearer(seed: int) -> None:
    found = gap(seed=seed, hidden_size=64, heads=4, intermediate_size=32, **DEEP)
    assert found.replayed <= found.free / 10
    assert 0.005 < found.mismatch < 0.1  # few choices differ, and cost most of the difference
