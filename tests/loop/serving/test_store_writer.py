import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.serving import chat, kept, recorded, writer
from support.tiny_models import offline, speaking, table

from rlake.loop.chat_api.errors import RequestError
from rlake.loop.chat_api.sessions import Sessions
from rlake.loop.inference.policy import Sampling
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.run import train
from rlake.loop.serving import store_writer
from rlake.loop.serving.journal import Journal
from rlake.loop.serving.rows import feedback_rows, row_ids
from rlake.store import Store
from rlake.store.errors import StoreError

ADDRESS = "/v1/chat/completions"
GOOD = "SELECT experience_id FROM feedback WHERE score >= 1"


async def ask(client: httpx.AsyncClient, *texts: str, **headers: str) -> dict[str, Any]:
    answer = await client.post(ADDRESS, json=chat(*texts), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def say(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/feedback", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_request_alone_is_a_row_and_a_session_one_row_when_it_ends(
    store: Store, tmp_path: Path
) -> None:
    async def work() -> None:
        async with kept(store, tmp_path / "serve", ScriptedPolicy(["4", "5"], version=3)) as client:
            await ask(client, "2+2=")
            session = {"X-Session-Id": "s", "X-Group-Id": "g"}
            await ask(client, "3+2=", **session)
            await ask(client, "3+2=", "5", "sure?", **session)
            await client.delete("/sessions/s")

    asyncio.run(work())
    rows = table(store, "experiences").sort("experience_id")
    assert rows["num_turns"].to_list() == [1, 2]
    assert rows["session_id"].to_list()[1] == "s"
    assert rows["group_id"].to_list()[1] == "served/g"
    assert set(rows["source"]) == {"served"}
    assert set(rows["policy_version"]) == {3}
    assert set(rows["task_id"]) == set(table(store, "tasks")["task_id"])
    assert list((tmp_path / "serve").iterdir()) == []  # all is stored: the journal is gone


def test_answers_of_one_request_and_sessions_of_one_group_are_tries_that_are_compared(
    store: Store, tmp_path: Path
) -> None:
    async def work() -> None:
        async with kept(store, tmp_path / "serve", ScriptedPolicy(["4", "5"])) as client:
            await client.post(ADDRESS, json=chat("2+2=", n=3))
            for i in range(3):
                await ask(client, "2+2=", **{"X-Session-Id": f"s{i}", "X-Group-Id": "g"})

    asyncio.run(work())
    rows = store.sql(
        "SELECT group_id, list_sort(list(rollout_index)) FROM experiences GROUP BY 1"
    ).fetchall()
    assert [rollouts for _, rollouts in rows] == [[0, 1, 2]] * 2
    assert store.count("tasks") == 1


def test_tries_of_many_groups_are_numbered_by_one_question_and_no_number_comes_twice(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_writer, "_GROUPS", 2)  # so few are remembered
    asked: list[str] = []
    sql = store.sql
    monkeypatch.setattr(store, "sql", lambda query, *a: (asked.append(query), sql(query, *a))[1])
    commits = 3

    async def work() -> None:
        waits = writer(store, tmp_path, store_seconds=60)
        sessions = Sessions(waits)
        for i in range(commits):
            ended = []
            for k in range(18):  # in an order in which the first is forgotten before it comes again
                ended.append(await recorded(sessions, f"s{i}-{k}", group=f"g{k % 6}"))
                await sessions.end(f"s{i}-{k}")
            assert await waits.stored(ended[-1], seconds=20)
        await sessions.close()
        assert await asyncio.to_thread(waits.close, seconds=20)

    asyncio.run(work())
    groups = "SELECT group_id, list_sort(list(rollout_index)) FROM experiences GROUP BY 1"
    assert sorted(sql(groups).fetchall()) == [
        (f"served/g{k}", list(range(3 * commits))) for k in range(6)
    ]
    assert len([query for query in asked if "max(rollout_index)" in query]) == commits


def test_what_a_killed_server_answered_is_stored_by_the_next_one_once(
    store: Store, tmp_path: Path
) -> None:
    async def work() -> None:
        killed = writer(store, tmp_path / "serve")
        sessions = Sessions(killed)
        policy = speaking(sampling=Sampling(max_tokens=3, temperature=0.7, top_k=4))
        found, *_ = [await recorded(sessions, name, policy=policy) for name in ("a", "b", "b")]
        said = {"feedback_id": "f", "annotator": "me", "score": 1.0}
        await killed.add_feedback(found, feedback_rows(row_ids(found), said))
        [folder] = (tmp_path / "serve").iterdir()
        half = folder / "00000009.jsonl"
        half.write_bytes(b'{"key": "half a li')  # as a kill leaves it: nobody was answered
        # a kill lets go of the lock; nothing is closed, nothing stored
        killed._journal._lock.release()  # pyright: ignore[reportPrivateUsage]

    asyncio.run(work())
    assert store.count("experiences") == 0
    for recovered in (2, 0):
        after = writer(store, tmp_path / "serve")
        assert after.recovered == recovered
        assert after.close(seconds=20)
    rows = table(store, "experiences")
    assert sorted(rows["session_id"]) == ["a", "b", "b"]
    assert all(rows["token_ids"].is_not_null())
    assert rows.select("temperature", "top_k").rows() == [(0.7, 4)] * 3


def test_a_journal_whose_sessions_are_stored_already_adds_nothing(
    store: Store, tmp_path: Path
) -> None:
    async def work() -> None:
        first = writer(store, tmp_path / "a")
        sessions = Sessions(first)
        await recorded(sessions, "s", group="g")
        journal = next((tmp_path / "a").glob("*/*.jsonl")).read_bytes()
        await sessions.close()
        assert await asyncio.to_thread(first.close, seconds=20)
        left = tmp_path / "b" / "journal-left"
        left.mkdir(parents=True)
        (left / "00000001.jsonl").write_bytes(journal)  # killed before it was forgotten

    asyncio.run(work())
    again = writer(store, tmp_path / "b")
    assert again.recovered == 0
    assert again.close(seconds=20)
    assert store.count("experiences") == 1


def test_a_file_of_the_journal_goes_when_its_sessions_are_stored(tmp_path: Path) -> None:
    async def work() -> None:
        journal = Journal(tmp_path, file_bytes=1000)
        for i in range(40):
            await journal.write(f"k{i % 4}", lambda i=i: {"key": f"k{i % 4}", "text": "x" * 200})
        many = len(list(journal.folder.glob("*.jsonl")))
        journal.forget({"k0", "k1", "k2"})
        assert len(list(journal.folder.glob("*.jsonl"))) == many
        journal.forget({"k3"})
        assert len(list(journal.folder.glob("*.jsonl"))) == 1 < many
        await asyncio.to_thread(journal.close)
        assert not journal.folder.exists()

    asyncio.run(work())


def test_rows_wait_while_the_store_is_away_and_requests_are_refused_when_too_many_do(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[float] = []
    enough = threading.Event()

    def away(*args: Any) -> Any:
        attempts.append(time.monotonic())
        if len(attempts) == 3:
            enough.set()
        raise StoreError("the disk is away")

    async def work() -> None:
        waits = writer(store, tmp_path / "serve", unstored_bytes=1000)
        monkeypatch.setattr(store, "append", away)
        session = await recorded(Sessions(waits), None)
        with pytest.raises(RequestError, match="wait for the store") as refused:
            waits.check()
        assert refused.value.status == 503
        assert await asyncio.to_thread(enough.wait, 60)
        monkeypatch.undo()
        assert await waits.stored(session, seconds=20)
        waits.check()
        assert await asyncio.to_thread(waits.close, seconds=20)

    asyncio.run(work())
    assert attempts[2] - attempts[0] > 0.5  # pauses of 0.2 and 0.4 s
    assert store.count("experiences") == 1


def test_feedback_on_a_session_ends_it_and_on_a_response_is_for_its_row(
    store: Store, tmp_path: Path
) -> None:
    async def work() -> dict[str, Any]:
        async with kept(store, tmp_path / "serve", ScriptedPolicy(["4", "5"])) as client:
            alone = (await ask(client, "2+2="))["id"]
            first = (await ask(client, "3+3=", **{"X-Session-Id": "s"}))["id"]
            await ask(client, "4+4=", **{"X-Session-Id": "s"})
            told = {
                "alone": await say(client, response_id=alone, reward=1, comment="right"),
                "live": await say(client, response_id=first, label="good", annotator="ann"),
                "session": await say(client, session_id="s", score=0.5),
                "later": await say(client, response_id=first, score=0.0),
            }
            row = told["alone"]["experience_ids"][0]
            same = {"experience_id": row, "score": 1, "feedback_id": "mine"}
            told["row"], told["again"] = await say(client, **same), await say(client, **same)
            for wrong in (
                {"score": 1},
                {"session_id": "s"},
                {"session_id": "s", "score": "high"},
                {"session_id": "s", "score": float("1e999")},
                {"session_id": "s", "experience_id": row, "score": 1},
            ):
                content = str(wrong).replace("'", '"').replace("inf", "1e999")
                head = {"content-type": "application/json"}
                answer = await client.post("/feedback", content=content, headers=head)
                assert answer.status_code == 400, wrong
            gone = await client.post("/feedback", json={"session_id": "nobody", "score": 1})
            assert gone.status_code == 404
            return told

    told = asyncio.run(work())
    assert [told[k]["stored"] for k in ("alone", "live", "session")] == [True, False, True]
    assert len(told["session"]["experience_ids"]) == 2
    assert told["live"]["experience_ids"] == told["later"]["experience_ids"]
    assert told["row"] == told["again"]
    rows = table(store, "feedback")
    assert rows.height == 1 + 1 + 2 + 1 + 1
    assert set(rows["experience_id"]) <= set(table(store, "experiences")["experience_id"])
    by = dict(rows.select("annotator", "label").unique().rows())
    assert by == {"client": None, "ann": "good"}


@pytest.mark.parametrize("algorithm", ["sft", {"grpo": {"group_size": 4}}])
def test_recorded_traffic_is_trained_on_with_its_feedback_and_nothing_else(
    store: Store, tmp_path: Path, algorithm: Any
) -> None:
    async def work() -> None:
        policy = speaking(sampling=Sampling(max_tokens=3))
        async with kept(store, tmp_path / "serve", policy) as client:
            for i in range(2):
                for k in range(4):
                    name = f"{i}-{k}"
                    await ask(client, f"{i}+1=", **{"X-Session-Id": name, "X-Group-Id": f"g{i}"})
                    await say(client, session_id=name, reward=k % 2)

    asyncio.run(work())
    is_sft = algorithm == "sft"
    where = "source = 'served'" + (f" AND experience_id IN ({GOOD})" if is_sft else "")
    trainer = {
        "where": where,
        "side_columns": ["reward=feedback:score"],
        "max_uses": 1,
        "batch_size": 4 if is_sft else 2,
    }
    train(store, offline(algorithm=algorithm, trainer=trainer))
    drawn = store.sql("SELECT count(*), count(DISTINCT experience_id) FROM draws").fetchall()
    assert drawn == ([(4, 4)] if is_sft else [(8, 8)])
    [(credit,)] = store.sql("SELECT count(*) FROM draws WHERE abs(advantage) > 0.5").fetchall()
    assert is_sft or credit == 8
