"""Agents that ask through OpenAI clients: their turns become rows, token for token."""

import asyncio
import shutil
import string
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import openai
import pytest
from support.environments import calculator
from support.rollouts import rollouts
from support.scripted_models import Parrot, parrot, spoken
from support.tiny_models import config, speaking, table

import rlake.loop
from rlake.loop.chat_api import router
from rlake.loop.chat_api.recording import record
from rlake.loop.inference.policy import Completion, Policy, PolicyError, Sampling
from rlake.loop.run import run
from rlake.loop.trajectories.trajectory import RolloutPolicy
from rlake.loop.workflows import single_turn
from rlake.store import Store, Task, connect
from rlake.store.errors import JobError

TASK = Task.ask("2+3=", "5")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
ASKED: list[Any] = [*TASK.messages]


async def asks(client: openai.AsyncOpenAI, messages: list[Any] = ASKED, **options: Any) -> Any:
    return await client.chat.completions.create(model="m", messages=messages, **options)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_with_tools_becomes_one_row_of_what_it_sampled(stream: bool) -> None:  # noqa: FBT001
    policy = parrot(f"Let me see. {CALL}", "5")

    async def go() -> tuple[str, list[Any]]:
        async with record(policy, TASK) as session:
            answer = await calculator(session.client, "2+3=", stream=stream)
            return answer, session.rows(reward=1.0)

    answer, [row] = asyncio.run(go())
    text, sampled = spoken(row, policy)
    assert answer == row.response_text == "5"
    assert sampled == [f"Let me see. {CALL}<eos>", "5<eos>"]
    assert text == (
        f"[tool add]\nuser: 2+3=\nassistant: Let me see. {CALL}<eos>\ntool: 5\nassistant: 5<eos>"
    )
    assert (row.num_turns, row.reward, row.task_id) == (2, 1.0, TASK.task_id)
    assert (row.policy_version, row.digests, row.engine) == (7, ["d7"], "parrot")
    assert row.logprobs is not None
    own = [p for p, is_own in zip(row.logprobs, row.loss_mask or (), strict=True) if is_own]
    first = len(f"Let me see. {CALL}") + 1
    expected = [-0.5 - i / 1024 for i in range(first)] + [-1.0, -1.0 - 1 / 1024]
    assert own == expected


def test_a_real_model_is_recorded_as_it_was_asked_otherwise() -> None:
    policy = RolloutPolicy(speaking(version=3), sampling=Sampling(max_tokens=3), rollout="r")
    same = RolloutPolicy(speaking(version=3), sampling=Sampling(max_tokens=3), rollout="r")

    async def go() -> list[Any]:
        async with record(policy, TASK) as session:
            messages: list[Any] = list(ASKED)
            for _ in range(2):
                made = await asks(session.client, messages)
                messages += [made.choices[0].message, {"role": "user", "content": "1+"}]
            return session.rows()

    [row] = asyncio.run(go())
    first = asyncio.run(single_turn(TASK, same))
    assert first.token_ids is not None
    assert (row.num_turns, row.policy_version) == (2, 3)
    assert list(row.token_ids or ())[: len(first.token_ids)] == list(first.token_ids)
    assert list(row.logprobs or ())[: len(first.token_ids)] == pytest.approx(first.logprobs)


def test_an_agent_that_blocks_asks_over_http_from_another_thread() -> None:
    policy = parrot("5")

    def blocking(client: openai.OpenAI) -> str | None:
        made = client.chat.completions.create(model="m", messages=ASKED)
        return made.choices[0].message.content

    async def go() -> tuple[str | None, list[Any]]:
        async with record(policy, TASK) as session:
            return await asyncio.to_thread(blocking, session.sync_client), session.rows()

    answer, [row] = asyncio.run(go())
    assert (answer, spoken(row, policy)[1]) == ("5", ["5<eos>"])


def test_a_session_over_http_needs_its_key_and_ends_with_its_block() -> None:
    async def go() -> None:
        async with record(parrot("5", "5"), TASK) as session:
            url, key = session.base_url, session.api_key
            async with openai.AsyncOpenAI(base_url=url, api_key="guess", max_retries=0) as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await stranger.models.list()
            mine = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
            await asks(mine)
        with pytest.raises(openai.NotFoundError, match="this session has ended"):
            await asks(mine)
        await mine.close()

    asyncio.run(go())


def test_tokens_are_sampled_as_the_run_says_and_not_as_the_agent_asks() -> None:
    policy = parrot("5", "5")
    as_run = RolloutPolicy(policy, sampling=Sampling(temperature=0.9, max_tokens=9, top_p=0.8))
    engine = policy.engine
    assert isinstance(engine, Parrot)

    async def go(**options: Any) -> None:
        async with record(as_run, TASK, **options) as session:
            await asks(session.client, temperature=0, top_p=0.1, max_tokens=4)

    asyncio.run(go())
    asyncio.run(go(heeds=["temperature"]))
    found = [(s.temperature, s.top_p, s.max_tokens) for s in engine.asked]
    assert found == [(0.9, 0.8, 4), (0.0, 0.8, 9)]


def test_several_answers_to_one_question_are_rows_of_their_own() -> None:
    policy = parrot("5", "6")

    async def go() -> list[Any]:
        async with record(policy) as session:
            await asks(session.client, n=2)
            return session.rows()

    rows = asyncio.run(go())
    assert [row.response_text for row in rows] == ["5", "6"]
    assert {row.task_id for row in rows} == {Task(messages=TASK.messages).task_id}
    assert len({row.session_id for row in rows}) == 1


def test_sessions_side_by_side_keep_to_themselves() -> None:
    policy = parrot(lambda prompt: prompt.split("user: ")[-1].split("\n")[0] + "!")

    async def one(number: int) -> list[str]:
        async with record(policy) as session:
            messages: list[Any] = []
            for turn in range(3):
                messages.append({"role": "user", "content": f"{number}.{turn}"})
                messages.append((await asks(session.client, messages)).choices[0].message)
            [row] = session.rows()
            return spoken(row, policy)[1]

    async def go() -> list[Any]:
        return await asyncio.gather(*(one(i) for i in range(12)))

    assert asyncio.run(go()) == [[f"{i}.{t}!<eos>" for t in range(3)] for i in range(12)]


def test_an_agent_that_fails_because_the_policy_did_has_its_finish_reason() -> None:
    long = Task.ask("1" * 3000)

    async def agent(task: Task, policy: Policy) -> None:
        async with record(policy, task) as session:
            await asks(session.client, [*task.messages])

    [row] = rollouts(parrot(), agent, long)
    assert row.finish_reason == "context_overflow"
    assert "the model takes 2000" in (row.drop_reason or "")


def test_an_agent_that_fails_by_itself_keeps_its_error_and_what_it_sampled() -> None:
    async def agent(task: Task, policy: Policy) -> None:
        async with record(policy, task) as session:
            await calculator(session.client, "2+3=")

    policy = parrot('<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    [row] = rollouts(policy, agent, TASK)
    assert (row.finish_reason, row.num_turns) == ("error", 1)
    assert "KeyError" in (row.drop_reason or "")


def test_an_agent_that_asks_nothing_is_told_so() -> None:
    async def go() -> None:
        async with record(parrot(), TASK) as session:
            session.rows()

    with pytest.raises(JobError, match="asked nothing of the policy"):
        asyncio.run(go())


def test_an_agent_that_blocks_the_loop_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "REPLY_SECONDS", 0.05)

    async def go() -> None:
        async with record(parrot("5"), TASK) as session:
            session.sync_client.chat.completions.create(model="m", messages=ASKED)

    with pytest.raises(PolicyError, match="run an agent that is not async in a thread"):
        asyncio.run(go())


def test_an_agent_that_is_given_up_gives_up_its_request() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    class Slow:
        version = 0

        async def generate(self, messages: Sequence[Any], **rest: Any) -> list[Completion]:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError("nobody sets the event")

    async def agent() -> None:
        async with record(Slow(), TASK) as session:
            await asks(session.client)

    async def go() -> None:
        work = asyncio.ensure_future(agent())
        await begun.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await asyncio.wait_for(ended.wait(), 60)

    asyncio.run(go())


def test_nothing_is_left_of_sessions_that_ended() -> None:
    async def go() -> tuple[int, int]:
        for _ in range(3):
            async with record(parrot("5"), TASK) as session:
                await calculator(session.client, "2+3=")
        return len(router.ROUTER.routes), len(router.application().app.state.sessions)

    assert asyncio.run(go()) == (0, 0)


def test_a_run_through_a_client_samples_and_learns_what_it_would_without(
    store: Store, tmp_path: Path
) -> None:
    shutil.copytree(tmp_path / "store", tmp_path / "other")
    other = connect(tmp_path / "other")
    run(store, config())
    run(other, config(explorer={"workflow": "support.environments:through_a_client"}))
    columns = (
        "batch, rollout_index, task_id, token_ids, loss_mask, policy_version, reward, logprobs"
    )
    one, two = (table(lake, "experiences ORDER BY ALL", columns) for lake in (store, other))
    assert len(one) == 18
    assert one.drop("logprobs").rows() == two.drop("logprobs").rows()
    # Requests of clients are batched as they come, and a batch's shape decides the last bit.
    for a, b in zip(one["logprobs"], two["logprobs"], strict=True):
        assert a.to_list() == pytest.approx(b.to_list(), abs=1e-5)


def test_workflows_are_imported_without_the_extra_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("chat_api", "workflows"):
        monkeypatch.setattr(rlake.loop, room, import_module(f"rlake.loop.{room}"))
        for name in [name for name in sys.modules if name.startswith(f"rlake.loop.{room}")]:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert import_module("rlake.loop.workflows").agent


def test_an_answer_is_forced_into_a_form_only_if_the_recording_heeds_it() -> None:
    form: Any = {"type": "json_object"}
    spec = {"alphabet": string.printable, "max_length": 512}

    async def go() -> list[Any]:
        policy = speaking(sampling=Sampling(max_tokens=5), **spec)
        async with record(policy, TASK) as session:
            with pytest.raises(
                openai.BadRequestError, match="add `json_schema` to `heeds`"
            ) as error:
                await asks(session.client, response_format=form)
            assert error.value.param == "response_format"
        async with record(policy, TASK, heeds=("json_schema",)) as session:
            await asks(session.client, response_format=form)
            return session.rows()

    [row] = asyncio.run(go())
    assert row.response_text is not None
    assert row.response_text.startswith("{")
    assert row.sampling == {"json_schema": '{"type": "object"}'}
