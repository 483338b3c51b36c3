"""A tiny real model behind the APIs of `rlake serve`, and what its rows must be."""

import asyncio
import string
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from openai import AsyncOpenAI
from support.scripted_models import TEMPLATE
from support.serving import listening, writer
from support.tiny_models import speaking, table, tiny

from rlake.loop.chat_api.app import create_app, new_sessions
from rlake.loop.config import ServeConfig
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import Sampling
from rlake.loop.inference.transformers_engine.engine import TransformersEngine
from rlake.store import Store

T = TypeVar("T")
SPEC: dict[str, Any] = {"alphabet": string.printable, "max_length": 512, "init_std": 0.4}
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "is_new": {"type": "boolean"}},
    "required": ["color", "is_new"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("paint", "erase")
]
ASK: Any = [{"role": "user", "content": "1+1="}]


def policy() -> ChatPolicy:
    """A policy without a chat template that can write JSON."""
    return speaking(sampling=Sampling(max_tokens=200), **SPEC)


def with_tools() -> ChatPolicy:
    """A policy whose chat template writes tools and their calls."""
    model, tokenizer = tiny(**SPEC)
    tokenizer.chat_template = TEMPLATE
    engine = TransformersEngine(model, tokenizer)
    return ChatPolicy(engine, sampling=Sampling(max_tokens=200))


def served(
    store: Store,
    folder: Path,
    who: ChatPolicy,
    ask: Callable[[AsyncOpenAI], Awaitable[T]],
    **settings: Any,
) -> T:
    """What a client is told by a server whose rows go to a store."""

    async def work() -> T:
        keeper, chosen = writer(store, folder), ServeConfig(commit_interval=0.01, **settings)
        sessions = new_sessions(keeper, chosen)
        app = create_app(who, settings=chosen, sessions=sessions)
        async with (
            listening(app) as address,
            AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
        ):
            told = await ask(client)
        await sessions.close()
        await who.engine.close()
        assert await asyncio.to_thread(keeper.close, seconds=20)
        return told

    return asyncio.run(work())


def likelihoods(tokens: list[int]) -> torch.Tensor:
    """The log-probs of all tokens after each prefix, in float64, by transformers alone."""
    model, _ = tiny(**SPEC)
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([tokens])).logits[0].double().log_softmax(-1)


def check_rows(store: Store) -> list[dict[str, Any]]:
    """Whether the log-probs of stored rows are the model's own; returns the rows."""
    rows = table(store, "experiences").sort("experience_id").rows(named=True)
    for row in rows:
        truth_TV = likelihoods(row["token_ids"])
        for i, is_own in enumerate(row["loss_mask"]):
            if is_own:
                true = float(truth_TV[i - 1, row["token_ids"][i]])
                assert row["logprobs"][i] == pytest.approx(true, abs=1e-4)
    assert rows
    return rows
