"""What goes wrong with one session holds up no other: feedback, ids, rows that do not fit."""

import asyncio
import fcntl
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.serving import chat, kept, recorded, writer

from rlake.loop.chat_api.sessions import Session, Sessions
from rlake.loop.inference.policy import Completion, Turn
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.serving.journal import Journal
from rlake.loop.serving.load_balancer import ExternalModelPolicy, LoadBalancedPolicy
from rlake.loop.serving.rows import feedback_rows, row_ids
from rlake.loop.serving.store_writer import StoreWriter
from rlake.store import Store

ADDRESS = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
HALF = "\ud800"
USER: Any = {"role": "user", "content": "1+1="}


def said(score: Any) -> dict[str, Any]:
    return {"feedback_id": "f", "annotator": "me", "score": score}


def turn(*texts: str, engine: str = "mine", ids: Sequence[int] = ()) -> Turn:
    *asked, answer = texts
    messages: Any = chat(*asked)["messages"]
    made = Completion(text=answer, finish_reason="stop", engine=engine, token_ids=ids or None)
    return Turn(messages=messages, completion=made)


def test_feedback_and_names_that_nobody_could_store_hold_nothing_up(
    store: Store, tmp_path: Path
) -> None:
    calls = [{"id": HALF, "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    odd = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, USER]

    async def work() -> list[int]:
        async with kept(store, tmp_path / "serve", ScriptedPolicy(["4"])) as client:

            async def post(path: str, **body: Any) -> httpx.Response:
                return await client.post(path, content=json.dumps(body), headers=JSON)

            name = (await post(ADDRESS, messages=[USER], user="s")).json()["id"]
            about = {"session_id": "s", "end": False}
            answers = [
                await post("/feedback", **about, comment=HALF),
                await post("/feedback", **about, score=1, feedback_id="f"),
                await post("/feedback", **about, score=1, feedback_id="f"),
                await post("/feedback", **about, score=0, feedback_id="f"),
                await post("/feedback", **about, score=10**400),
                await post(ADDRESS, messages=odd),
                *await asyncio.gather(
                    post("/feedback", session_id="s", score=1),
                    post("/feedback", session_id="s", label="good"),
                ),
                await post("/feedback", response_id=name, score=1, feedback_id="f"),
                await post("/feedback", response_id=name, score=0, feedback_id="f"),
                await post("/feedback", response_id=name[:9], score=1),  # a part of many names
            ]
            return [answer.status_code for answer in answers]

    statuses = asyncio.run(work())
    assert statuses == [200, 200, 200, 409, 400, 200, 200, 200, 200, 409, 404]
    assert (store.count("experiences"), store.count("feedback")) == (2, 4)


def test_a_session_that_the_store_refuses_is_set_aside_and_others_are_stored(
    store: Store, tmp_path: Path
) -> None:
    folder = tmp_path / "serve"

    async def work(kept: StoreWriter) -> None:
        sessions = Sessions(kept)
        for name in ("bad", "good"):
            session = await recorded(sessions, name)
            score = "high" if name == "bad" else 1.0
            await kept.add_feedback(session, feedback_rows(row_ids(session), said(score)))
        [journal] = folder.glob("*/*.jsonl")
        killed.append(journal.read_bytes())
        await sessions.close()
        assert await asyncio.to_thread(kept.close, seconds=20)

    killed: list[bytes] = []
    asyncio.run(work(writer(store, folder)))
    assert (store.count("experiences"), store.count("feedback")) == (2, 1)
    [aside] = folder.iterdir()
    assert aside.name.startswith("refused-")
    assert '"high"' in aside.read_text()

    left = folder / "journal-left"
    left.mkdir()
    (left / "00000001.jsonl").write_bytes(killed[0])
    assert writer(store, folder).close(seconds=20)  # a server begins all the same
    assert list(folder.iterdir()) == [aside]


def test_a_row_keeps_its_number_as_conversations_of_a_session_go_on() -> None:
    session = Session(id="s", key="k")
    session.turns = [turn("a", "1"), turn("b", "2")]
    session.responses = ["first", "second"]
    before = [row_ids(session, name) for name in session.responses]
    session.turns.append(turn("a", "1", "more", "3"))
    session.responses.append("third")
    assert [row_ids(session, name) for name in ("first", "second")] == before
    assert row_ids(session, "third") == before[0]


class Listens(ScriptedPolicy):
    """Notes whose earlier turns it is told of."""

    heard: Sequence[Turn] = ()

    async def generate(self, *args: Any, earlier: Sequence[Turn] = (), **more: Any) -> Any:
        self.heard = earlier
        return await super().generate(*args, **more)


def test_tokens_of_another_model_are_no_part_of_a_prompt_or_a_row() -> None:
    own, judge = Listens(["4"]), Listens(["fine"])
    models = {"own": LoadBalancedPolicy([own]), "judge": ExternalModelPolicy(judge, "judge")}
    turns: list[Turn] = []

    async def work() -> None:
        for name in ("own", "judge", "own", "judge"):
            [made] = await models[name].generate([USER], earlier=list(turns))
            turns.append(Turn(messages=[USER], completion=made))

    asyncio.run(work())
    assert (list(own.heard), list(judge.heard)) == ([turns[0]], [turns[1]])
    mixed = [turn("a", "1"), turn("a", "1", "well?", "good", engine="judge")]
    assert len(row_ids(Session(id="s", key="k", turns=mixed, responses=["x", "y"]))) == 2


def test_a_line_that_cannot_be_written_ends_no_journal(tmp_path: Path) -> None:
    async def work() -> None:
        journal = Journal(tmp_path)
        empty: dict[str, Any] = {}
        with pytest.raises(KeyError):
            await asyncio.wait_for(journal.write("k", lambda: empty["nothing"]), 60)
        await asyncio.wait_for(journal.write("k", lambda: {"key": "k"}), 60)
        await asyncio.to_thread(journal.close)

    asyncio.run(work())


def test_lines_that_share_a_sync_wake_their_loop_once(tmp_path: Path) -> None:
    woken: list[Any] = []

    class Counting(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, callback: Any, *args: Any, **more: Any) -> asyncio.Handle:
            woken.append(callback)
            return super().call_soon_threadsafe(callback, *args, **more)

    async def work() -> None:
        journal, queued = Journal(tmp_path), threading.Event()
        first = asyncio.create_task(
            journal.write("0", lambda: {"key": "0", "all": queued.wait(60)})
        )
        more = [asyncio.create_task(journal.write(f"{i}", lambda: {"key": "k"})) for i in range(50)]
        await asyncio.sleep(0)  # each has handed in its line
        queued.set()
        await asyncio.wait_for(asyncio.gather(first, *more), 60)
        assert len(woken) <= 2
        fd = journal._fd  # pyright: ignore[reportPrivateUsage]
        assert fd is not None
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DSYNC
        assert sum(len(path.read_bytes().splitlines()) for path in tmp_path.rglob("*.jsonl")) == 51
        await asyncio.to_thread(journal.close)

    with asyncio.Runner(loop_factory=Counting) as runner:
        runner.run(work())
