"""Tokens a second of our engine on transformers, and of `generate` in fixed, padded batches.

64 requests at once, whose lengths have a long tail, on a small model; sampled at temperature 1,
with no end token, so that both sample the same number of tokens. Both go by turns.
"""

import asyncio
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from .figure import Bench, Figure, say

if TYPE_CHECKING:
    from rlake.loop.inference import Request

REQUESTS, REPEAT, THREADS = 64, 5, 2
VOCABULARY, HIDDEN, LAYERS = 2000, 256, 4
BUDGET = 1.5
"""How many times as many tokens a second as `generate` we sample at least."""
WORK = (
    f"{REQUESTS} requests, prompts of 8-63 tokens, answers lognormal (median 55, at most 700), "
    f"Qwen3 of {LAYERS} layers of {HIDDEN}, {VOCABULARY} tokens, float32, {THREADS} threads"
)


def engine(bench: Bench) -> Iterator[Figure]:
    """Measure the engine against batches of 16 and of all requests."""
    import torch

    torch.set_num_threads(THREADS)
    requests = asked()
    ways: dict[str, Callable[[], None]] = {
        "engine": ours(requests),
        "generate_16": theirs(requests, 16),
        f"generate_{REQUESTS}": theirs(requests, REQUESTS),
    }
    tokens = sum(request.sampling.max_tokens for request in requests)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(REPEAT + 1):
        for name, way in ways.items():
            began = perf_counter()
            way()
            if turn:  # the first one warms up
                speeds[name].append(tokens / (perf_counter() - began))
    for name, found in speeds.items():
        say(f"{name}: {[round(speed) for speed in found]} tokens/s")
        message = f"{WORK}; median of {REPEAT}"
        yield Figure(f"{name}_speed", round(median(found)), "tokens/s", None, message)
    for name in list(ways)[1:]:
        ratios = [a / b for a, b in zip(speeds["engine"], speeds[name], strict=True)]
        message = f"engine to {name}, budget a minimum; {WORK}; median of {REPEAT}"
        yield Figure(
            f"engine_to_{name}",
            round(median(ratios), 2),
            "times",
            BUDGET,
            message,
            round(min(ratios), 2),
        )


def asked() -> "list[Request]":
    """Return requests of very different lengths."""
    from rlake.loop.inference import Request
    from rlake.loop.inference.policy import Sampling

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4, 0.9, REQUESTS), 4, 700).astype(int).tolist()
    return [
        Request(
            prompt_ids=rng.integers(3, VOCABULARY, int(rng.integers(8, 64))).tolist(),
            sampling=Sampling(max_tokens=length, seed=i),
        )
        for i, length in enumerate(lengths)
    ]


def model() -> tuple[Any, Any]:
    """Return a model, and a tokenizer whose end token it does not have."""
    from rlake.loop.config import TinyModel
    from rlake.loop.models.load import make_tiny

    alphabet = "".join(chr(0x4E00 + i) for i in range(VOCABULARY))
    spec = TinyModel(
        hidden_size=HIDDEN,
        layers=LAYERS,
        heads=4,
        alphabet=alphabet,
        max_length=1024,
        init_std=0.02,
    )
    network, tokenizer = make_tiny(spec, seed=0)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    return network.eval(), tokenizer


def ours(requests: "list[Request]") -> Callable[[], None]:
    """Return how we do it: every request is one of its own."""
    from rlake.loop.inference.transformers_engine.engine import TransformersEngine

    made = TransformersEngine(*model())

    async def ask() -> None:
        got = await asyncio.gather(*(made.complete([request]) for request in requests))
        assert [len(g.token_ids) for [g] in got] == [r.sampling.max_tokens for r in requests]

    return lambda: asyncio.run(ask())


def theirs(requests: "list[Request]", size: int) -> Callable[[], None]:
    """Return how `generate` does it, in batches that take as long as their longest."""
    import torch

    network, _ = model()
    network.generation_config.eos_token_id = None

    def ask() -> None:
        for start in range(0, len(requests), size):
            part = requests[start : start + size]
            width = max(len(request.prompt_ids) for request in part)
            rows = [[0] * (width - len(r.prompt_ids)) + list(r.prompt_ids) for r in part]
            ids = torch.tensor(rows)
            with torch.inference_mode():
                network.generate(
                    ids,
                    attention_mask=(ids != 0).long(),
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=max(request.sampling.max_tokens for request in part),
                    pad_token_id=0,
                )

    return ask
