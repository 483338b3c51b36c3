"""What a network says of tokens: as log-softmax of its own logits does, but in chunks."""

from typing import Any

import pytest
import torch
from support.tiny_models import tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3ForCausalLM,
)

from rlake.loop.models.lm_head import head_of
from rlake.loop.models.token_logprobs import STATISTICS, Scorer
from rlake.store.errors import JobError

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, Any] = {
    "gemma2": Gemma2Config(**SIZES, final_logit_softcapping=2.0, attn_logit_softcapping=None),
    "granite": GraniteConfig(**SIZES, logits_scaling=4.0),
    "cohere": CohereConfig(**SIZES, logit_scale=0.25),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
}


class Shifted(Qwen3ForCausalLM):
    """A model that changes its logits in an unknown way."""

    def forward(self, *args: Any, **options: Any) -> Any:
        out: Any = super().forward(*args, **options)
        out.logits = out.logits + torch.linspace(0, 3, out.logits.shape[-1])
        return out


def of_family(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "shifted":
        return Shifted(tiny()[0].config)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_config(FAMILIES[name], attn_implementation="sdpa")
    return model.eval()


def a_batch(*, vocabulary: int = 15) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    token_ids = torch.randint(3, vocabulary, (4, 11))
    mask = (torch.rand(4, 11) < 0.6).float()
    mask[:, 0], mask[1, 5:], mask[3] = 0, 0, 0
    return token_ids, mask


TEMPERATURES = [0.7, torch.tensor([0.7, 1.0, 0.3, 1.9])]
"""One of all rows, and one of each."""


def expected(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    mask: torch.Tensor,
    temperature: float | torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Both statistics from the model's own logits, all of them at once."""
    logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1].double()
    logprobs = torch.log_softmax(logits / torch.as_tensor(temperature).reshape(-1, 1, 1), -1)
    chosen = logprobs.gather(-1, token_ids[:, 1:, None])[..., 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    pad = torch.nn.functional.pad
    return {"logprobs": pad(chosen, (1, 0)) * mask, "entropy": pad(entropy, (1, 0)) * mask}


def gradients(model: PreTrainedModel, value: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    value.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("temperature", TEMPERATURES, ids=["one", "each"])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, "shifted"])
def test_statistics_are_those_of_the_models_own_logits(
    *, family: str, packing: bool, temperature: float | torch.Tensor
) -> None:
    model = of_family(family)
    token_ids, mask = a_batch()
    torch.manual_seed(2)
    say = {name: torch.randn(mask.shape) for name in ("logprobs", "entropy")}
    for max_logits_bytes in (1, 4 * 16 * 40 * 3, 2**28):  # a token a chunk, three, all of them
        scorer = Scorer(model, packing=packing or None, max_logits_bytes=max_logits_bytes)
        both = ["logprobs", "entropy"]
        found = scorer(token_ids, mask, temperature=temperature, statistics=both)
        wanted = expected(model, token_ids, mask, temperature)
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name].float(), rtol=1e-5, atol=1e-5)
        for names in (["logprobs"], ["logprobs", "entropy"]):
            found = scorer(token_ids, mask, temperature=temperature, statistics=names)
            ours = gradients(model, sum((say[n] * found[n]).sum() for n in names))  # type: ignore[arg-type]
            wanted = expected(model, token_ids, mask, temperature)
            truth = gradients(model, sum((say[n] * wanted[n]).sum() for n in names))  # type: ignore[arg-type]
            assert float((ours - truth).abs().max()) <= 2e-5 * float(truth.abs().max())


def test_what_models_do_to_their_logits_is_found() -> None:
    factors = {name: head_of(of_family(name)) for name in FAMILIES}
    assert {n: (h.factor, h.cap) for n, h in factors.items() if h is not None} == {
        "gemma2": (1.0, 2.0),
        "granite": (0.25, None),
        "cohere": (0.25, None),
        "qwen2": (1.0, None),
    }
    assert head_of(of_family("shifted")) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_is_found_in_every_type_inside_autocast_too(family: str, dtype: torch.dtype) -> None:
    found = []
    for enabled in (False, True):
        model: Any = of_family(family)
        model.to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            head = head_of(model)
        assert head is not None
        found.append((head.factor, head.cap))
    assert found[0] == found[1]
    if dtype in (torch.float32, torch.float64):
        alone = head_of(of_family(family))
        assert alone is not None
        assert found[0] == (alone.factor, alone.cap)


def test_a_statistic_of_whole_distributions_has_the_gradient_of_log_softmax() -> None:
    model, _ = tiny()
    token_ids, mask = a_batch()
    found = Scorer(model, max_logits_bytes=1)(token_ids, mask, statistics=["discriminator"])
    ours = gradients(model, found["discriminator"].sum())
    logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1]
    logprobs = torch.log_softmax(logits, -1)[mask[:, 1:] > 0]
    truth = gradients(model, STATISTICS["discriminator"](logprobs, token_ids[0, :1]).sum())
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-6)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, torch.Tensor):
                self.numbers = max(self.numbers, made.numel())
        return out


@pytest.mark.parametrize("names", [["logprobs"], ["logprobs", "entropy"], ["discriminator"]])
def test_logits_are_never_there_as_a_whole(names: list[str]) -> None:
    vocabulary, tokens = 3000, 128
    config = Qwen2Config(**{**SIZES, "vocab_size": vocabulary}, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    ids = torch.randint(3, vocabulary, (2, tokens))
    scorer = Scorer(model, max_logits_bytes=4 * vocabulary * 40)
    with Largest() as seen:
        found = scorer(ids, torch.ones(2, tokens), statistics=names)
        sum(found[name].sum() for name in names).backward()  # type: ignore[union-attr]
    assert seen.numbers <= 3 * tokens * vocabulary / 8  # of 2 x tokens x vocabulary
    with Largest() as seen:
        model(input_ids=ids).logits.sum().backward()
    assert seen.numbers == 2 * tokens * vocabulary


def test_a_batch_without_trained_tokens_says_nothing_and_still_has_a_gradient() -> None:
    model, _ = tiny()
    for packing in (False, True):
        scorer = Scorer(model, packing=packing)
        found = scorer(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1))["logprobs"]
        assert found.shape == (1, 1)
        found = scorer(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3))["logprobs"]
        assert not gradients(model, found.sum()).any()


@pytest.mark.parametrize("temperature", TEMPERATURES, ids=["one", "each"])
def test_whole_distributions_are_those_of_the_models_own_logits(
    temperature: float | torch.Tensor,
) -> None:
    policy, teacher = of_family("gemma2"), of_family("granite")
    token_ids, mask = a_batch()
    found = Scorer(policy, max_logits_bytes=1)(
        token_ids,
        mask,
        temperature=temperature,
        against=(teacher, lambda p, q: (p.exp() * (p - q)).sum(-1)),
    )["vocabulary"]
    divisor = torch.as_tensor(temperature).reshape(-1, 1, 1)
    p, q = (
        torch.log_softmax(m(input_ids=token_ids, use_cache=False).logits[:, :-1] / divisor, -1)
        for m in (policy, teacher)
    )
    wanted = torch.nn.functional.pad((p.exp() * (p - q)).sum(-1), (1, 0)) * mask
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(JobError, match="`Shifted` changes its logits in an unknown way"):
        Scorer(policy)(token_ids, mask, against=(of_family("shifted"), lambda p, q: p[:, 0]))
