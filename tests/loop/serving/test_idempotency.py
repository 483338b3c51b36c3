"""Who tries again gets the answer that was given, and makes no row: by key, by id, after a kill."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.serving import asking, chat, kept
from support.tiny_models import table

from rlake.loop.chat_api.app import create_app
from rlake.loop.chat_api.errors import RequestError
from rlake.loop.chat_api.sessions import Session, Sessions
from rlake.loop.config import LimitsConfig
from rlake.loop.inference.policy import Completion
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.store import Store

ADDRESS = "/v1/chat/completions"
KEY = {"Idempotency-Key": "order-7"}


class Counts(ScriptedPolicy):
    """Counts what it is asked, and answers when it may."""

    def __init__(self) -> None:
        super().__init__(["one", "two", "three"])
        self.asked, self.may_go, self.begun = 0, asyncio.Event(), asyncio.Event()
        self.may_go.set()

    async def generate(self, *args: Any, **options: Any) -> list[Completion]:
        self.asked += 1
        self.begun.set()
        await self.may_go.wait()
        return await super().generate(*args, **options)


@pytest.mark.parametrize("name", ["Idempotency-Key", "X-Request-Id"])
@pytest.mark.parametrize("more", [{}, {"user": "žluť"}, {"stream": True}, {"n": 2}])
def test_a_retry_has_the_answer_that_was_given_and_is_one_row(
    name: str, more: dict[str, Any], store: Store, tmp_path: Path
) -> None:
    policy = Counts()

    async def work() -> list[str]:
        async with kept(store, tmp_path / "serve", policy) as client:
            answers = [
                await client.post(ADDRESS, json=chat("1+1=", **more), headers={name: "a"})
                for _ in range(3)
            ]
            other = await client.post(ADDRESS, json=chat("1+1=", **more), headers={name: "b"})
            assert {a.status_code for a in [*answers, other]} == {200}
            assert answers[0].headers["x-session-id"] == answers[1].headers["x-session-id"]
            return [_said(answer) for answer in answers]

    said = asyncio.run(work())
    assert said[0] == said[1] == said[2]
    assert policy.asked == 2
    rows = table(store, "experiences")
    names = [json.loads(text)["responses"] for text in rows["metadata"]]
    assert len({one for some in names for one in some}) == 2


def _said(answer: httpx.Response) -> str:
    if "json" in answer.headers["content-type"]:
        told = answer.json()
        return told["id"] + "".join(c["message"]["content"] for c in told["choices"])
    pieces = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line[6:7] == "{"]
    deltas = [c["delta"].get("content", "") for piece in pieces for c in piece["choices"]]
    return pieces[0]["id"] + "".join(deltas)


def test_a_retry_while_the_first_is_answered_waits_for_it() -> None:
    policy = Counts()
    policy.may_go.clear()
    app = create_app(policy)

    async def ask(client: httpx.AsyncClient) -> list[str]:
        async def post() -> httpx.Response:
            return await client.post(ADDRESS, json=chat("?"), headers=KEY)

        first = asyncio.create_task(post())
        await policy.begun.wait()
        second = asyncio.create_task(post())
        await asyncio.sleep(0.05)
        policy.may_go.set()
        return [(await one).text for one in (first, second)]

    first, second = asking(app, ask)
    assert first == second
    assert policy.asked == 1


def test_another_request_under_a_key_is_refused_and_under_a_request_id_is_another() -> None:
    policy = Counts()

    async def ask(client: httpx.AsyncClient) -> list[Any]:
        async def post(text: str, **headers: str) -> httpx.Response:
            return await client.post(ADDRESS, json=chat(text), headers=headers)

        trace = {"X-Request-Id": "trace"}
        answers = [await post(t, **h) for h in (KEY, trace) for t in ("a", "b")]
        answers.append(await post("a", **{"Idempotency-Key": "k" * 201}))
        body = chat("a", request_id="r")  # as clients of vLLM name it
        answers += [await client.post(ADDRESS, json=body) for _ in range(2)]
        return [(a.status_code, a.json().get("id")) for a in answers]

    *told, r1, r2 = asking(create_app(policy), ask)
    assert [status for status, _ in told] == [200, 422, 200, 200, 400]
    assert r1 == r2
    assert policy.asked == 4


def test_after_the_server_began_anew_a_key_makes_no_second_row(
    store: Store, tmp_path: Path
) -> None:
    async def work() -> httpx.Response:
        async with kept(store, tmp_path / "serve", ScriptedPolicy(["4"])) as client:
            return await client.post(ADDRESS, json=chat("2+2="), headers=KEY)

    assert asyncio.run(work()).status_code == 200
    again = asyncio.run(work())
    assert (again.status_code, again.json()["error"]["code"]) == (409, "already_answered")
    assert store.count("experiences") == 1


def test_answers_are_kept_in_so_many_bytes_and_that_they_were_given_for_longer(
    store: Store, tmp_path: Path
) -> None:
    limits = LimitsConfig(retry_bytes=4000)

    async def work() -> list[int]:
        policy = ScriptedPolicy(["4"])
        async with kept(store, tmp_path / "serve", policy, limits=limits) as client:
            keys = [0, 1, 2, 3, 4, 4, 0]
            answers = [
                await client.post(ADDRESS, json=chat("?"), headers={"Idempotency-Key": str(key)})
                for key in keys
            ]
            return [answer.status_code for answer in answers]

    assert asyncio.run(work()) == [200] * 6 + [409]
    assert store.count("experiences") == 5


def test_what_could_not_be_recorded_is_no_row_and_may_be_tried_again() -> None:
    stored: list[Session] = []

    class Full:
        is_full = True

        async def keep(self, session: Session, turns: Sequence[Any], response_id: str) -> None:
            if self.is_full:
                raise RequestError("no space left", status=503)

        async def ended(self, session: Session) -> None:
            stored.append(session)

    sink = Full()
    sessions = Sessions(sink)
    policy = Counts()
    app = create_app(policy, sessions=sessions)

    async def ask(client: httpx.AsyncClient) -> list[int]:
        statuses = []
        for is_full in (True, False):
            sink.is_full = is_full
            for more in ({}, {"user": "u"}):
                headers = {"Idempotency-Key": str(more)}
                answer = await client.post(ADDRESS, json=chat("?", **more), headers=headers)
                statuses.append(answer.status_code)
        await sessions.close()
        return statuses

    assert asking(app, ask) == [503, 503, 200, 200]
    assert [len(session.turns) for session in stored] == [1, 1]
    assert policy.asked == 4


def test_a_client_that_leaves_while_its_answer_is_recorded_makes_no_second_row(
    store: Store, tmp_path: Path
) -> None:
    policy = Counts()

    async def work() -> str:
        async with kept(store, tmp_path / "serve", policy) as client:
            app: Any = client._transport.app  # type: ignore[attr-defined]  # pyright: ignore
            record, slow = app.state.sessions.record, asyncio.Event()

            async def slowly(*args: Any, **options: Any) -> Any:
                slow.set()
                await asyncio.sleep(0.05)
                return await record(*args, **options)

            app.state.sessions.record = slowly
            first = asyncio.create_task(client.post(ADDRESS, json=chat("?"), headers=KEY))
            await slow.wait()
            first.cancel()
            again = await client.post(ADDRESS, json=chat("?"), headers=KEY)
            return again.json()["choices"][0]["message"]["content"]

    assert asyncio.run(work()) == "one"
    assert policy.asked == store.count("experiences") == 1
