"""Batched sampling from a causal language model with a KV cache, kept as it was sampled."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True)
class Request:
    """One sequence to be sampled. Equal requests to equal weights give equal tokens."""

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Sampled:
    """What was sampled for one request; log-probs in nats at the temperature sampled with."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@torch.inference_mode()
def sample(
    model: PreTrainedModel, requests: Sequence[Request], *, eos_id: int, pad_id: int
) -> list[Sampled]:
    """Sample all requests as one batch, prompts padded on the left (B sequences, P prompt tokens).

    The randomness of a sequence comes from its own seed alone, one number a token, so that it does
    not depend on its neighbours. A prompt that occurs several times is read by the model once.
    """
    device = model.device
    steps = max(r.max_tokens for r in requests)
    noise_BN = torch.stack([_noise(r.seed, steps) for r in requests])
    limits_B = torch.tensor([r.max_tokens for r in requests])
    temperature_B = torch.tensor([r.temperature for r in requests], device=device)

    logits_BV, cache, mask_BP = _prefill(model, requests, pad_id)
    position_B = mask_BP.sum(1)
    done_B = torch.zeros(len(requests), dtype=torch.bool)
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    for step in range(steps):
        token_B, logprob_B = _choose(logits_BV, temperature_B, noise_BN[:, step])
        tokens.append(token_B.cpu())
        logprobs.append(logprob_B.cpu())
        done_B |= (tokens[-1] == eos_id) | (step + 1 >= limits_B)
        if done_B.all():
            break
        mask_BP = torch.cat([mask_BP, mask_BP.new_ones(len(requests), 1)], 1)
        output = model(
            input_ids=token_B[:, None],
            attention_mask=mask_BP,
            position_ids=position_B[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits_BV = output.logits[:, -1]
        position_B = position_B + 1
    return _cut(torch.stack(tokens, 1), torch.stack(logprobs, 1), limits_B, eos_id)


def _prefill(
    model: PreTrainedModel, requests: Sequence[Request], pad_id: int
) -> tuple[Tensor, DynamicCache, Tensor]:
    """Read each different prompt once, then repeat its cache for every request that has it."""
    prompts = [tuple(r.prompt_ids) for r in requests]
    unique = list(dict.fromkeys(prompts))
    longest = max(len(p) for p in unique)
    ids_UP = torch.tensor([[pad_id] * (longest - len(p)) + list(p) for p in unique])
    mask_UP = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in unique])
    ids_UP, mask_UP = ids_UP.to(model.device), mask_UP.to(model.device)
    position_UP = (mask_UP.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    output = model(
        input_ids=ids_UP,
        attention_mask=mask_UP,
        position_ids=position_UP,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    place = {p: i for i, p in enumerate(unique)}
    rows_B = torch.tensor([place[p] for p in prompts], device=model.device)
    if len(unique) < len(prompts):
        cache.batch_select_indices(rows_B)
    return output.logits[:, -1][rows_B], cache, mask_UP[rows_B]


def _noise(seed: int, steps: int) -> Tensor:
    """Return one uniform number in [0, 1) for each token that the sequence may have."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(steps, generator=generator, dtype=torch.float64)


def _choose(logits_BV: Tensor, temperature_B: Tensor, noise_B: Tensor) -> tuple[Tensor, Tensor]:
    """Sample by inverting the cumulative distribution; temperature 0 takes the likeliest token."""
    greedy_B = temperature_B == 0
    scale_B = torch.where(greedy_B, torch.ones_like(temperature_B), temperature_B)
    logprobs_BV = torch.log_softmax(logits_BV.float() / scale_B[:, None], dim=-1)
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    target_B1 = (noise_B.to(logits_BV.device) * cumulative_BV[:, -1])[:, None]
    sampled_B = torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0]
    sampled_B = sampled_B.clamp(max=logits_BV.shape[-1] - 1)
    token_B = torch.where(greedy_B, logits_BV.argmax(-1), sampled_B)
    return token_B, logprobs_BV.gather(-1, token_B[:, None])[:, 0]


def _cut(tokens_BN: Tensor, logprobs_BN: Tensor, limits_B: Tensor, eos_id: int) -> list[Sampled]:
    """Cut each sequence after its end token, or at its limit."""
    sampled = []
    for tokens, logprobs, limit in zip(
        tokens_BN.tolist(), logprobs_BN.tolist(), limits_B.tolist(), strict=True
    ):
        stop = tokens.index(eos_id) + 1 if eos_id in tokens else len(tokens) + 1
        end = min(stop, limit, len(tokens))
        reason = "stop" if stop <= end else "length"
        sampled.append(Sampled(tokens[:end], logprobs[:end], reason))
    return sampled
