"""Penalties, biases and lengths: what is sampled, and that log-probs stay the model's own."""

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support.processed_logits import END, changed
from support.tiny_models import tiny
from transformers import PreTrainedModel

from rlake.loop.inference import Request, Sampled
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import PolicyError, Sampling
from rlake.loop.inference.transformers_engine.engine import TransformersEngine

PROMPT = [3, 4, 13, 5, 14]
HOWS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"min_tokens": 6},
    {"logit_bias": ((7, 4.0), (9, -3.5))},
    {"repetition_penalty": 1.3, "presence_penalty": -1.0, "frequency_penalty": 0.5}
    | {"min_tokens": 3, "logit_bias": ((7, 2.0),)},
]


def logits_before(tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """The model's logits in float64 before each token of an answer, by transformers alone."""
    ids = torch.tensor([[*PROMPT, *tokens]])
    with torch.no_grad():
        return alone()(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].double().numpy()


@cache
def alone() -> PreTrainedModel:
    """The model that no engine has."""
    return tiny()[0].eval()


def sampled(*hows: Sampling) -> list[Sampled]:
    model, tokenizer = tiny()
    requests = [Request(prompt_ids=PROMPT, sampling=how) for how in hows]
    return asyncio.run(TransformersEngine(model, tokenizer).complete(requests))


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_changed_logits_are_sampled_from_and_log_probs_are_of_the_models_own(
    how: dict[str, Any], temperature: float
) -> None:
    chosen = [
        Sampling(max_tokens=12, temperature=temperature, seed=i, **how)
        for i in range(1 if temperature == 0 else 40)
    ]
    # in one batch with requests that change nothing, which must not notice
    plain = [Sampling(max_tokens=12, temperature=temperature, seed=i) for i in range(4)]
    together = sampled(*chosen, *plain)
    assert [s.token_ids for s in together[len(chosen) :]] == [s.token_ids for s in sampled(*plain)]
    observed, expected, variance = 0.0, 0.0, 0.0
    for one in together[: len(chosen)]:
        tokens = list(one.token_ids)
        logits = logits_before(tokens)
        for i, (token, logprob, raw) in enumerate(zip(tokens, one.logprobs, logits, strict=True)):
            own = raw / (temperature or 1.0)
            assert logprob == pytest.approx(own[token] - np.log(np.exp(own).sum()), abs=1e-4)
            made = changed(raw, PROMPT, tokens[:i], chosen[0])
            if temperature == 0:
                assert token == made.argmax()
                continue
            p = np.exp(made / temperature) / np.exp(made / temperature).sum()
            assert p[token] > 0
            # a token's own probability: its sum over many tokens has a known mean and variance
            observed += p[token]
            expected += float((p**2).sum())
            variance += float((p**3).sum() - (p**2).sum() ** 2)
    assert abs(observed - expected) <= 4 * variance**0.5


def test_least_tokens_come_before_an_end_token_and_a_stop_text() -> None:
    hows = [Sampling(max_tokens=30, seed=i, min_tokens=8, temperature=1.3) for i in range(30)]
    found = [s.token_ids for s in sampled(*hows)]
    assert min(map(len, found)) > 8
    assert {s[-1] for s in found} >= {END}
    hows = [Sampling(max_tokens=30, seed=i, min_tokens=8, stop=tuple("0123")) for i in range(30)]
    assert min(len(s.token_ids) for s in sampled(*hows)) > 8


def test_the_end_token_may_be_ignored() -> None:
    hows = [Sampling(max_tokens=30, seed=i, ignore_eos=True, temperature=1.3) for i in range(10)]
    found = sampled(*hows)
    assert {(len(s.token_ids), s.finish_reason) for s in found} == {(30, "length")}
    assert any(END in s.token_ids for s in found)


def policy() -> ChatPolicy:
    model, tokenizer = tiny()
    return ChatPolicy(TransformersEngine(model, tokenizer))


def test_of_a_long_prompt_the_last_tokens_are_kept() -> None:
    asked = [{"role": "user", "content": "1+2=" * 20}]
    how = Sampling(max_tokens=4, truncate_prompt_tokens=6)
    with pytest.raises(PolicyError, match="the prompt has 80 tokens, the model takes 48"):
        asyncio.run(policy().generate(asked, sampling=Sampling(max_tokens=4)))
    [answer] = asyncio.run(policy().generate(asked, sampling=how))
    tokenizer = tiny()[1]
    assert tokenizer.decode(list(answer.prompt_ids or ())) == "2=1+2="
    assert how.columns["sampling"] == {"truncate_prompt_tokens": 6}
    # no room for an answer is left
    with pytest.raises(PolicyError, match="takes 48") as error:
        asyncio.run(policy().generate(asked, sampling=Sampling(truncate_prompt_tokens=48)))
    assert error.value.finish_reason == "context_overflow"


def test_a_bias_of_a_token_that_does_not_exist_is_refused() -> None:
    how = Sampling(logit_bias=((999, 1.0),))
    with pytest.raises(PolicyError, match=r"names the token 999.* 15 tokens") as error:
        asyncio.run(policy().generate([{"role": "user", "content": "1"}], sampling=how))
    assert error.value.finish_reason == "invalid_request"
