"""Sequences that lie one after another in a row say what they say alone."""

from typing import Any

import pytest
import torch
from support.tiny_models import gradients, tiny
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel, Qwen2Config

from rlake.loop.models.packing import can_pack, read_lengths, taken
from rlake.loop.models.token_logprobs import Scorer
from rlake.loop.trainer.micro_batches import plan_micro_batches
from rlake.loop.trainer.networks import checkpoint_activations
from rlake.store.errors import ConfigError

LENGTHS = [5, 17, 9, 12, 7, 3, 17, 10, 6, 14]
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def a_gradient(*, again: bool) -> torch.Tensor:
    """The gradient of packed rows, with and without doing the layers' work again."""
    model, _ = tiny()
    scorer = Scorer(model, packing=True)
    if again:
        checkpoint_activations(model)
    torch.manual_seed(0)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        token_ids, mask = torch.randint(3, 15, (4, 20)), torch.ones(4, 20)
        value = scorer(token_ids, mask)["logprobs"].sum()
    value.backward()
    return torch.cat([torch.tensor([float(sum(kept))]), gradients(model)])


def test_packed_layers_may_do_their_work_again() -> None:
    kept, again = a_gradient(again=False), a_gradient(again=True)
    torch.testing.assert_close(kept[1:], again[1:])
    assert again[0] < kept[0] / 2


def test_sequences_of_all_lengths_have_the_gradient_of_padded_ones() -> None:
    found = {}
    for packing in (False, True):
        model = of(Qwen2Config(**SIZES))
        torch.manual_seed(0)
        token_ids, weight = torch.randint(0, 40, (12, 60)), torch.randn(12, 60)
        lengths = torch.tensor([2, 60, 11, 3, 59, 30, 30, 10, 19, 2, 51, 50])
        mask = (torch.arange(60) < lengths[:, None]).float()
        logprobs = Scorer(model, packing=packing)(token_ids, mask)["logprobs"]
        (logprobs * weight * mask).sum().backward()
        found[packing] = gradients(model)
    torch.testing.assert_close(found[True], found[False], atol=1e-5, rtol=1e-4)


def of(config: Any, *, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def test_a_window_of_attention_is_that_of_each_sequence() -> None:
    model = of(MistralConfig(**SIZES, sliding_window=4))
    torch.manual_seed(0)
    token_ids = torch.randint(0, 40, (3, 14))
    mask = torch.ones(3, 14)
    mask[1, 9:] = 0
    with torch.no_grad():
        alone = Scorer(model, packing=False)(token_ids, mask)["logprobs"]
        packed = Scorer(model, packing=True)(token_ids, mask)["logprobs"]
        wide = of(MistralConfig(**SIZES, sliding_window=None))
        wide.load_state_dict(model.state_dict())
        other = Scorer(wide, packing=True)(token_ids, mask)["logprobs"]
    torch.testing.assert_close(alone, packed, atol=1e-5, rtol=1e-5)
    assert float((packed - other).abs().max()) > 1e-3


def test_no_more_is_read_than_up_to_the_last_wanted_position() -> None:
    wanted = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]]) > 0
    assert read_lengths(wanted).tolist() == [2, 0, 4]
    assert read_lengths(wanted[1:2]).tolist() == [1]


def test_the_network_reads_each_token_once_and_no_padding() -> None:
    mask = torch.zeros(3, 20)
    for row, length in enumerate((7, 20, 3)):
        mask[row, 1:length] = 1
    token_ids = torch.arange(3, 6)[:, None].expand(3, 20)
    assert tokens_read(token_ids, mask) == 6 + 19 + 2


def groups() -> tuple[torch.Tensor, torch.Tensor]:
    """Two groups of four rows: prompts of 6 and 9 tokens, and answers of 4, of which one is cut."""
    torch.manual_seed(0)
    token_ids, mask = torch.randint(3, 15, (8, 13)), torch.zeros(8, 13)
    for first, prompt in ((0, 6), (4, 9)):
        token_ids[first : first + 4, :prompt] = token_ids[first, :prompt]
        mask[first : first + 4, prompt : prompt + 4] = 1
    mask[2, 8:] = 0
    mask[5, 10] = 0  # what a tool said, between two turns
    return token_ids, mask


def test_a_prompt_that_rows_share_is_read_once() -> None:
    token_ids, mask = groups()
    # the last token of an answer is not read
    assert tokens_read(token_ids, mask) == 6 + (3 + 3 + 1 + 3) + 9 + 4 * 3
    token_ids[1, 0] = 16 - token_ids[0, 0]
    assert tokens_read(token_ids, mask) == 2 * 6 + (3 + 3 + 1 + 3) + 9 + 4 * 3


@pytest.mark.parametrize("window", [None, 4])
def test_rows_with_a_shared_prompt_have_the_gradient_of_padded_ones(window: int | None) -> None:
    token_ids, mask = groups()
    weight, found = torch.randn(mask.shape, dtype=torch.float64), {}
    for packing in (False, True):
        model = of(MistralConfig(**SIZES, sliding_window=window)).double()
        logprobs = Scorer(model, packing=packing)(token_ids, mask)["logprobs"]
        (logprobs * weight).sum().backward()
        found[packing] = logprobs.detach(), gradients(model)
    torch.testing.assert_close(found[True], found[False], atol=1e-6, rtol=1e-5)


def tokens_read(token_ids: torch.Tensor, mask: torch.Tensor) -> int:
    model, _ = tiny()
    seen: list[int] = []
    scorer = Scorer(model, packing=True)
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, options: seen.append(options["input_ids"].numel()), with_kwargs=True
    )
    scorer(token_ids, mask)
    [count] = seen
    return count


def test_a_model_with_its_own_way_of_attention_is_read_padded() -> None:
    model = of(Qwen2Config(**SIZES), attention="eager")
    assert not can_pack(model)
    assert not Scorer(model, packing=None).packs
    with pytest.raises(ConfigError, match=r"`trainer.packing` is true, and `Qwen2ForCausalLM`"):
        Scorer(model, packing=True)


def test_a_model_that_counts_positions_itself_is_read_padded() -> None:
    model, _ = tiny()
    rotary = model.model.rotary_emb
    counted = rotary.forward
    rotary.forward = lambda x, position_ids: counted(x, torch.arange(x.shape[1])[None])
    assert not can_pack(model)


def test_a_model_with_attention_in_chunks_is_read_padded() -> None:
    model, _ = tiny()
    assert can_pack(model)
    model, _ = tiny()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    assert not can_pack(model)


def test_gradients_of_a_shared_prompt_add_up_in_float32() -> None:
    values = torch.randn(2, 3, 8, generator=torch.manual_seed(0)).bfloat16().requires_grad_()
    at = torch.arange(3).repeat(512)
    weights = torch.rand(2, len(at), 8).bfloat16()
    (taken(values, at) * weights).sum().backward()
    assert values.grad is not None
    exact = weights.double().unflatten(1, (512, 3)).sum(1)
    assert float((values.grad.double() / exact - 1).abs().max()) <= 2**-8


def test_a_model_that_mixes_packed_sequences_is_read_padded() -> None:
    class Remembering(type(tiny()[0].get_decoder())):  # type: ignore[misc]
        def forward(self, **options: Any) -> Any:
            out = super().forward(**options)
            out.last_hidden_state = out.last_hidden_state.cumsum(1)
            return out

    model, _ = tiny()
    model.get_decoder().__class__ = Remembering
    assert not can_pack(model)
    assert getattr(model.config, "_attn_implementation") == "sdpa"  # noqa: B009


def test_a_model_that_packs_is_saved_and_generates_as_before(tmp_path: Any) -> None:
    model, _ = tiny()
    prompt = torch.tensor([[3, 4, 5], [6, 7, 8]])
    before = model.generate(prompt, max_new_tokens=5, do_sample=False)  # type: ignore[operator]
    assert can_pack(model)
    assert torch.equal(before, model.generate(prompt, max_new_tokens=5, do_sample=False))  # type: ignore[operator]
    model.save_pretrained(tmp_path)
    assert "sdpa_packed" not in (tmp_path / "config.json").read_text()


def test_packed_groups_count_their_tokens_and_padded_ones_their_width() -> None:
    for packed in (False, True):
        groups = plan_micro_batches(LENGTHS, 40, packed=packed)
        assert sorted(i for group in groups for i in group) == list(range(len(LENGTHS)))
        sizes = [
            sum(LENGTHS[i] for i in g) if packed else len(g) * max(LENGTHS[i] for i in g)
            for g in groups
        ]
        assert max(sizes) <= 40
    assert len(plan_micro_batches(LENGTHS, 40, packed=True)) == 3
    assert plan_micro_batches([50, 3, 2], 5, units=[0, 1, 1], packed=True) == [[0], [1, 2]]
