"""Answers are sent while they are sampled: to real clients, by a real server and a real engine."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
import pytest
from openai import AsyncOpenAI
from support.scripted_models import Parrot
from support.serving import chat, listening
from support.tiny_models import tiny

from rlake.loop.chat_api.app import create_app
from rlake.loop.chat_api.sessions import Session
from rlake.loop.inference import Request, Sampled
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import Policy, Sampling, Turn
from rlake.loop.inference.transformers_engine import engine as engines
from rlake.loop.serving.load_balancer import LoadBalancedPolicy
from rlake.loop.trajectories.trajectory import to_experiences
from rlake.store import Task

T = TypeVar("T")
TOKENS = 24
SEED = 13
"""With which answers are long."""
ASKED: Any = [{"role": "user", "content": "1+1="}]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
PATH = "/v1/chat/completions"


class Gate:
    """Holds a model's steps up behind the first few, until it is opened."""

    def __init__(self, network: Any, *, free: int = 4, breaks: bool = False) -> None:
        self.steps, self._free, self._breaks = 0, free, breaks
        self._opened = threading.Event()
        self.open = self._opened.set
        network.register_forward_pre_hook(self._step)

    def _step(self, *_: Any) -> None:
        self.steps += 1
        if self.steps > self._free:
            assert self._opened.wait(60), "nobody opened the gate"
            if self._breaks:
                raise RuntimeError("the model broke")


@pytest.fixture(autouse=True)
def _steps_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the event loop be free while a step is held up."""
    monkeypatch.setattr(engines, "SHORT_SECONDS", -1.0)


def speaking(*, seed: int = 0) -> tuple[ChatPolicy, Any]:
    """A policy that speaks through a real model, whose answers are long; and what to gate."""
    model, tokenizer = tiny(seed=seed)
    engine = engines.TransformersEngine(model, tokenizer)
    policy = ChatPolicy(engine, sampling=Sampling(max_tokens=TOKENS))
    return policy, model.get_decoder()


@asynccontextmanager
async def asking(app: Any) -> AsyncIterator[AsyncOpenAI]:
    async with (
        listening(app) as url,
        AsyncOpenAI(base_url=f"{url}/sessions/s/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def bounded(work: Callable[[], Awaitable[T]]) -> T:
    return asyncio.run(asyncio.wait_for(work(), 90))


async def streamed(client: AsyncOpenAI, on_text: Callable[[], None], **more: Any) -> str:
    """Ask for a streamed answer; return its content."""
    options = {"model": "m", "messages": ASKED, "seed": SEED, "stream": True, **more}
    stream: Any = await client.chat.completions.create(**options)
    text = ""
    async for piece in stream:
        if piece.choices and piece.choices[0].delta.content:
            text += piece.choices[0].delta.content
            on_text()
    return text


def test_answers_come_while_they_are_sampled_and_say_what_they_say_unstreamed() -> None:
    policy, network = speaking()
    app = create_app(policy)
    asked: Any = {"model": "m", "messages": ASKED, "seed": SEED, "n": 3}

    async def work() -> None:
        async with asking(app) as client:
            whole = await client.chat.completions.create(**asked)
            gate = Gate(network)
            stream: Any = await client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}, logprobs=True
            )
            texts, steps, ends, usage = ["", "", ""], 0, [], None
            async for piece in stream:
                usage = piece.usage
                for choice in piece.choices:
                    texts[choice.index] += choice.delta.content or ""
                    ends += [choice] if choice.finish_reason else []
                if all(texts) and not steps:
                    steps = gate.steps  # the engine waits at the fifth, in the midst of all of them
                    gate.open()
            assert 0 < steps <= 5
            assert gate.steps > 10
            assert texts == [choice.message.content for choice in whole.choices]
            assert [len(end.logprobs.content) > 10 for end in ends] == [True] * 3
            assert usage == whole.usage

    bounded(work)
    turns = app.state.sessions.turns("s")
    assert [turn.completion.token_ids for turn in turns[:3]] == [
        turn.completion.token_ids for turn in turns[3:]
    ]
    assert b"rlake_serve_first_token_seconds_count 1.0" in app.state.metrics.text()
    assert b"rlake_serve_overhead_seconds_count 2.0" in app.state.metrics.text()


class Writes:
    """A sink that waits, and may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self.turns: Sequence[Turn] = ()
        self.writes, self.may_go = asyncio.Event(), asyncio.Event()
        self._fails = fails

    async def keep(self, session: Session, turns: Sequence[Turn], response_id: str) -> None:
        self.turns = turns
        self.writes.set()
        await asyncio.wait_for(self.may_go.wait(), 60)
        if self._fails:
            raise OSError("no space left on device")

    async def ended(self, session: Session) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_an_answer_ends_when_its_turn_is_recorded_and_not_before(fails: bool) -> None:  # noqa: FBT001
    async def work() -> None:
        policy, network = speaking()
        gate, sink = Gate(network), Writes(fails=fails)
        app = create_app(policy, sink)
        text, ends, seen = "", [], asyncio.Event()

        async def read(url: str) -> None:
            nonlocal text
            body = chat("1+1=", stream=True, seed=SEED)
            async with (
                httpx.AsyncClient(base_url=url) as client,
                client.stream("POST", PATH, json=body) as answer,
            ):
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    told = line.removeprefix("data: ")
                    choices = json.loads(told).get("choices") if told.startswith("{") else ()
                    text += choices[0]["delta"].get("content", "") if choices else ""
                    if told and (not choices or choices[0]["finish_reason"]):
                        ends.append(told)
                    if text:
                        gate.open()
                    if sink.turns and text == sink.turns[0].completion.text:
                        seen.set()

        async with listening(app) as url:
            reads = asyncio.create_task(read(url))
            await sink.writes.wait()
            while text != sink.turns[0].completion.text:
                await asyncio.sleep(0)
            assert ends == []
            sink.may_go.set()
            await reads
        if fails:
            [error] = ends
            assert json.loads(error)["error"]["message"].startswith("the server failed")
            assert b'broken_streams_total{status="500"} 1.0' in app.state.metrics.text()
        else:
            assert (len(ends), ends[-1]) == (2, "[DONE]")

    bounded(work)


def test_a_client_that_goes_away_ends_what_is_sampled_for_it() -> None:
    policy, network = speaking()
    app = create_app(policy)

    async def work() -> None:
        gate = Gate(network)
        async with listening(app) as url, httpx.AsyncClient(base_url=url) as client:
            body = chat("1+1=", stream=True, seed=SEED, user="u")
            async with client.stream("POST", PATH, json=body) as answer:
                async for line in answer.aiter_lines():
                    if '"delta": {"content"' in line:
                        break
            while b"disconnects_total 1.0" not in app.state.metrics.text():
                await asyncio.sleep(0)
            gate.open()
            await client.post(PATH, json=chat("1+1=", max_tokens=1))
            assert gate.steps < 10 < TOKENS
            assert app.state.serving.waiting == 0

    bounded(work)
    assert app.state.sessions.turns("u") == []


def test_an_engine_that_breaks_in_mid_answer_is_told_and_nothing_is_recorded() -> None:
    policy, network = speaking()
    gate = Gate(network, breaks=True)
    app = create_app(policy)

    async def work() -> str:
        body = chat("1+1=", stream=True, seed=SEED, user="u")
        async with (
            listening(app) as url,
            httpx.AsyncClient(base_url=url) as client,
            client.stream("POST", PATH, json=body) as answer,
        ):
            lines = []
            async for line in answer.aiter_lines():
                lines += [line] if line else []
                gate.open()
            return lines[-1]

    error = json.loads(bounded(work).removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("engine_error", "server_error")
    assert "the model broke" in error["message"]
    assert app.state.sessions.turns("u") == []


def test_another_engine_goes_on_with_an_answer_whose_engine_broke() -> None:
    breaks, network = speaking()
    whole, _ = speaking()
    balanced: Policy = LoadBalancedPolicy([breaks, whole])
    gate = Gate(network, breaks=True)
    app = create_app(balanced)

    async def work() -> None:
        async with asking(app) as client:
            assert await streamed(client, gate.open) == await streamed(client, gate.open)

    bounded(work)
    first, second = app.state.sessions.turns("s")
    assert first.completion.token_ids == second.completion.token_ids
    assert len(first.completion.text) > 10


class Pauses(Parrot):
    """Says all but the end of an answer, and waits."""

    def __init__(self, *answers: str) -> None:
        super().__init__(answers)
        self.may_go = asyncio.Event()

    async def complete(self, requests: Sequence[Request]) -> list[Sampled]:
        [request] = requests
        [made] = await super().complete([request])
        await self.may_go.wait()
        return [made]


def test_calls_come_whole_behind_the_content_and_the_session_stays_exact_to_the_token() -> None:
    async def work() -> None:
        engine = Pauses(f" Let me see. {CALL} ", "It is 4.")
        app = create_app(ChatPolicy(engine))
        async with asking(app) as client:
            asked: Any = {"model": "m", "tools": TOOLS, "stream": True}
            stream: Any = await client.chat.completions.create(messages=ASKED, **asked)
            content, calls, before, reason = "", [], "", None
            async for piece in stream:
                delta, reason = piece.choices[0].delta, piece.choices[0].finish_reason
                content += delta.content or ""
                if delta.content:
                    before = content
                    engine.may_go.set()
                calls += delta.tool_calls or []
            assert content == before == " Let me see."
            [call] = calls
            assert json.loads(call.function.arguments) == {"a": 1}
            assert reason == "tool_calls"
            said: Any = {"role": "assistant", "content": content, "tool_calls": [call.model_dump()]}
            told: Any = {"role": "tool", "tool_call_id": call.id, "content": "4"}
            stream = await client.chat.completions.create(messages=[*ASKED, said, told], **asked)
            async for piece in stream:
                assert not piece.choices[0].delta.tool_calls
        [row] = to_experiences(Task.ask("1+1="), app.state.sessions.turns("s"))
        assert (row.num_turns, row.response_text) == (2, "It is 4.")

    bounded(work)


THINKS = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_thoughts_are_streamed_apart_and_stay_in_the_session_as_they_were_sampled() -> None:
    engine = Parrot(
        [
            "<think>\none and one\n</think>\n\nTwo.",
            "<think>again</think>Still two.",
            "<think>x</think>3",
        ]
    )
    engine.tokenizer.chat_template = THINKS

    async def work() -> None:
        app = create_app(ChatPolicy(engine, reasoning_format="think"))
        async with asking(app) as client:
            parts = {"reasoning_content": "", "content": ""}
            stream: Any = await client.chat.completions.create(
                model="m", messages=ASKED, stream=True
            )
            async for piece in stream:
                for name in parts:
                    parts[name] += getattr(piece.choices[0].delta, name, None) or ""
            assert parts == {"reasoning_content": "one and one", "content": "Two."}
            # this client leaves the thought out, as most do
            told: Any = [*ASKED, {"role": "assistant", "content": "Two."}, *ASKED]
            whole: Any = await client.chat.completions.create(model="m", messages=told)
            message = whole.choices[0].message
            assert (message.content, message.reasoning_content) == ("Still two.", "again")
            [row] = to_experiences(Task.ask("1+1="), app.state.sessions.turns("s"))
            assert row.num_turns == 2
            assert (row.messages or [{}])[-1]["reasoning_content"] == "again"
            events: Any = await client.responses.create(model="m", input="1+1=", stream=True)
            texts = [e.delta async for e in events if e.type == "response.output_text.delta"]
            assert "".join(texts) == "3"

    bounded(work)
