"""Endpoints whose answers are heard while they are sampled, and streams that go wrong."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
from openai import AsyncOpenAI
from support.endpoints import ASKED, Reply, Server, answering, refused, said
from support.serving import listening
from support.tiny_models import speaking

from rlake.loop.chat_api.app import create_app
from rlake.loop.config import Endpoint
from rlake.loop.inference.endpoint.policy import EndpointPolicy
from rlake.loop.inference.policy import Completion, PolicyError, Sampling
from rlake.loop.inference.token_stream import TokenStream, streaming_to
from rlake.loop.inference.transformers_engine import engine as engines
from rlake.loop.trajectories.trajectory import to_experiences
from rlake.store import Task

STREAM = {"Content-Type": "text/event-stream; charset=utf-8"}
TOKENS: dict[str, Any] = {"extra_body": {"return_token_ids": True}}


def piece(content: str | None = None, *, end: str | None = None, **rest: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": end, **rest}]}


def streamed(*events: dict[str, Any] | str) -> Reply:
    """Answer with a stream."""
    told = [event if isinstance(event, str) else f"data: {json.dumps(event)}" for event in events]
    return Reply("".join(f"{event}\n\n" for event in told).encode(), headers=STREAM)


def heard(server: Server, *, tools: Any = None, **settings: Any) -> tuple[list[Completion], str]:
    """Ask an endpoint once; return the answers, and what was told of the first before its end."""
    policy = EndpointPolicy(Endpoint(url=server.url, model="m", **settings), first_wait=0.001)

    async def work() -> tuple[list[Completion], str]:
        listener = TokenStream()
        with streaming_to(listener):
            answers = await policy.generate(ASKED, tools=tools)
        left = listener.left([one.text for one in answers])
        return answers, answers[0].text.removesuffix(left[0])

    with closing(policy):
        return asyncio.run(work())


def test_an_answer_comes_through_two_servers_while_it_is_sampled_and_keeps_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "SHORT_SECONDS", -1.0)  # so that the event loop is free meanwhile
    inner = create_app(speaking(sampling=Sampling(max_tokens=24)))
    asked: Any = {"model": "m", "messages": ASKED, "seed": 13, "stream": True}

    async def work() -> tuple[Any, Any]:
        async with listening(inner) as url:
            policy = EndpointPolicy(Endpoint(url=f"{url}/v1", model="m", **TOKENS))
            outer = create_app(policy)
            with closing(policy):
                async with (
                    listening(outer) as address,
                    AsyncOpenAI(base_url=f"{address}/sessions/s/v1", api_key="none") as client,
                ):
                    stream: Any = await client.chat.completions.create(**asked)
                    texts = [p.choices[0].delta.content or "" async for p in stream if p.choices]
                    [turn] = outer.state.sessions.turns("s")
                    return texts, turn

    texts, turn = asyncio.run(asyncio.wait_for(work(), 60))
    [row] = to_experiences(Task.ask("2+2="), [turn])
    assert len([text for text in texts if text]) > 5
    assert "".join(texts) == row.response_text
    assert len(turn.completion.token_ids) == len(turn.completion.logprobs) > 10
    assert sum(row.loss_mask or ()) == len(turn.completion.token_ids)
    assert 0 < turn.completion.timing.first_token < turn.completion.timing.total


def test_a_stream_says_what_an_answer_says_and_asks_for_its_usage() -> None:
    tokens: list[dict[str, Any]] = [
        {"token_ids": [token], "logprobs": {"content": [{"logprob": -i}]}}
        for i, token in enumerate((52, 50, 0))
    ]
    reply = streamed(
        ": still at it",
        {"prompt_token_ids": [50], **piece("4", **tokens[0])},
        piece("2", **tokens[1]),
        piece(end="length", **tokens[2]),
        {"choices": [], "usage": {"completion_tokens": 3}},
        "data: [DONE]",
    )
    with answering(reply) as server:
        [answer], told = heard(server)
    assert (answer.text, told, answer.finish_reason) == ("42", "42", "length")
    assert (answer.prompt_ids, answer.token_ids) == ([50], [52, 50, 0])
    assert answer.logprobs == [0, -1, -2]
    [body] = server.asked
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


@pytest.mark.parametrize("usage", [{"completion_tokens": 3}, {}, None])
def test_token_ids_that_may_not_be_all_are_not_kept(usage: Any) -> None:
    reply = streamed(
        {"prompt_token_ids": [50], **piece("4", token_ids=[52])},
        {**piece(end="stop", token_ids=[0]), "usage": usage},
    )
    with answering(reply) as server:
        [answer], told = heard(server)
    assert (answer.text, told) == ("4", "4")
    assert answer.token_ids is answer.logprobs is None


def test_an_endpoint_that_does_not_stream_and_one_that_is_given_tools_answer_whole() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    with answering(said("4")) as server:
        assert heard(server)[1] == ""
        assert heard(server, tools=[tool])[0][0].text == "4"
    assert ["stream" in body for body in server.asked] == [True, False]


@pytest.mark.parametrize(
    ("replies", "why"),
    [
        ([streamed(piece("4")), said("5")], "ended its answer before the end, in the midst of it"),
        (
            [Reply(streamed(piece("4")).body, headers=STREAM, claims=999), said("5")],
            "cannot be reached: .*, in the midst of it",
        ),
        ([streamed(piece("4"), {"error": {"message": "out of memory"}})], "broke off: .*memory"),
        ([streamed(piece("4"), "data: {half")], "streamed no chat completion, but `{half`"),
        ([streamed(piece("4"), piece(end="stop", logprobs={"content": [3]}))], "streamed no chat"),
        ([Reply(b"data: " + b"x" * (1 << 20), headers=STREAM)], "streams without end: `data: xxx"),
    ],
)
def test_a_stream_that_breaks_is_an_error_that_says_so(replies: Sequence[Reply], why: str) -> None:
    with answering(replies) as server, pytest.raises(PolicyError, match=why):
        heard(server)
    assert len(server.asked) == 1


def test_a_stream_that_breaks_before_anything_was_told_is_asked_for_again() -> None:
    replies = [refused(503), streamed(), streamed(piece("4"), piece(end="stop"))]
    with answering(replies) as server:
        [answer], told = heard(server, max_retries=3)
    assert (answer.text, told, len(server.asked)) == ("4", "4", 3)
