"""Models that vLLM serves on a CPU, their versions, and how far its answers are from theirs."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import tiny
from transformers import PreTrainedModel

from rlake.loop.inference import Request, Sampled, Weights
from rlake.loop.inference.policy import Sampling
from rlake.loop.models.state_dict import state_of, weights_digest

PROMPT = [3, 4, 13, 5, 14]
SPEC: dict[str, Any] = {
    "hidden_size": 64,
    "layers": 2,
    "heads": 2,
    "init_std": 0.2,
    "max_length": 2048,
}
"""On CPUs vLLM wants attention heads of 32 dimensions at least."""


def in_a_loop(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own: the engine outlives them all."""

    @functools.wraps(test)
    def ran(**fixtures: object) -> None:
        asyncio.run(test(**fixtures))

    return ran


def written(folder: Path, version: int, **spec: Any) -> Weights:
    model, tokenizer = tiny(seed=version, **SPEC | spec)
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(state_of(model), folder / "model.safetensors", metadata={"format": "pt"})
    digest = weights_digest(load_file(folder / "model.safetensors"))
    return Weights(version=version, digest=digest, folder=folder)


def asks(n: int, **sampling: object) -> list[Request]:
    given = {"max_tokens": 160, **sampling}
    return [
        Request(prompt_ids=PROMPT, sampling=Sampling(seed=i, **given))  # type: ignore[arg-type]
        for i in range(n)
    ]


@torch.inference_mode()
def logprobs(
    model: PreTrainedModel, token_ids: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """The log-probs of all tokens at each place behind the prompt, by transformers."""
    logits = model(torch.tensor([[*PROMPT, *token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def furthest(
    sampled: Sequence[Sampled], models: Sequence[PreTrainedModel], temperature: float = 1.0
) -> float:
    """How far log-probs are from those of the weights that their segments name."""
    worst = 0.0
    for one in sampled:
        assert sum(s.num_tokens for s in one.segments) == len(one.token_ids) == len(one.logprobs)
        at = 0
        for segment in one.segments:
            end = at + segment.num_tokens
            found = logprobs(models[segment.policy_version], one.token_ids, temperature)[at:end]
            own = found.gather(-1, torch.tensor(one.token_ids[at:end])[:, None])[:, 0]
            worst = max(worst, float((own - torch.tensor(one.logprobs[at:end])).abs().max()))
            at = end
    return worst
