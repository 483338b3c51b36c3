"""`rlake serve` in processes of its own: real clients, real kills, strangers at the door."""

import asyncio
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.serving import CONFIG, Served, attack, load, lost

from rlake.loop import cli
from rlake.store import connect

USER: Any = {"role": "user", "content": "1+1="}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_a_server_for_others_is_refused_without_a_token(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLAKE_SERVE_TOKEN", raising=False)
    (tmp_path / "load.yaml").write_text(CONFIG)
    place = str(tmp_path / "lake")
    args = ["serve", str(tmp_path / "load.yaml"), "--store", place, "--host", host]
    assert cli.run_command(args) == 2
    assert "needs a token" in capsys.readouterr().err
    assert not Path(place).exists()


def test_a_token_for_feedback_that_is_not_set_opens_no_door(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATERS", " ")
    (tmp_path / "load.yaml").write_text(CONFIG)
    place = str(tmp_path / "lake")
    args = ["serve", str(tmp_path / "load.yaml"), "--store", place]
    assert cli.run_command([*args, "--set", "serve.feedback_token_env=RATERS"]) == 2
    assert "RATERS, which is not set" in capsys.readouterr().err
    assert not Path(place).exists()


def test_a_model_without_a_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "load.yaml").write_text(CONFIG)
    assert cli.run_command(["serve", str(tmp_path / "load.yaml"), "--model", "folder"]) == 2
    assert "judge=path/to/model" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_clients_of_openai_are_answered_and_nothing_answered_is_lost_by_a_kill(
    tmp_path: Path,
) -> None:
    from openai import AsyncOpenAI, OpenAI

    served = Served(tmp_path)
    ids: list[str] = []
    options: dict[str, Any] = {"base_url": served.url + "/sessions/s/v1", "api_key": "none"}
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with OpenAI(**options) as client:
        assert [model.id for model in client.models.list()] == ["load"]
        messages: Any = [USER]
        for _ in range(2):
            answer = client.chat.completions.create(model="load", messages=messages, tools=tools)
            ids.append(answer.id)
            messages += [answer.choices[0].message, USER]

    async def streamed() -> str:
        async with AsyncOpenAI(base_url=served.url + "/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="load", messages=[USER], stream=True, max_tokens=5
            )
            text = ""
            async for piece in stream:
                ids.append(piece.id)
                text += piece.choices[0].delta.content or "" if piece.choices else ""
            return text

    assert len(asyncio.run(streamed())) <= 5
    found = asyncio.run(load(served, seconds=2))
    assert found.errors == 0
    assert served.end(signal.SIGKILL) == -signal.SIGKILL

    again = Served(tmp_path)
    assert again.told["recovered"] > 0
    assert lost(again.store, ids + found.ids) == 0
    assert again.end() == 0
    rows = connect(tmp_path / "lake").sql(
        "SELECT num_turns, len(token_ids) = len(loss_mask), tools IS NOT NULL "
        "FROM experiences WHERE session_id = 's'"
    )
    assert rows.fetchall() == [(2, True, True)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_strangers_large_bodies_and_idle_connections_bring_nothing_down(tmp_path: Path) -> None:
    served = Served(tmp_path)
    before = served.rss
    told = asyncio.run(attack(served.url, connections=6000, megabytes=20))
    assert told["connections"] > 0
    assert told["large_body"] in (0, 413)
    assert (told["web_page"], told["still_answers"]) == (415, 200)
    assert served.rss - before < 300 << 20
    assert served.end() == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_learns_from_its_own_traffic_and_drops_no_request_as_weights_change(
    tmp_path: Path,
) -> None:
    from rlake.loop.config import load as load_config
    from rlake.loop.run import train

    more = "trainer: {where: \"source = 'served'\", steps: 3, max_uses: 100, batch_size: 4}\n"
    served = Served(tmp_path, config=CONFIG + more, args=("--set", "serve.poll_interval=0.05"))
    asyncio.run(load(served, seconds=1))
    lake = connect(tmp_path / "lake")
    with httpx.Client(base_url=served.url, timeout=60) as client:
        said = {"messages": [USER], "user": "u"}
        assert client.post("/v1/chat/completions", json=said).status_code == 200
        told = client.post("/feedback", json={"session_id": "u", "reward": 1}).json()
        assert told["stored"]

        trains = threading.Thread(
            target=train, args=(lake, load_config(str(tmp_path / "load.yaml"), []))
        )
        trains.start()
        deadline = time.monotonic() + 200
        version, statuses = 0, set()
        while version < 3 and time.monotonic() < deadline:
            answer = client.post("/v1/chat/completions", json={"messages": [USER]})
            statuses.add(answer.status_code)
            version = answer.json()["choices"][0]["policy_version"]
        trains.join()
    assert (version, statuses) == (3, {200})
    assert served.end() == 0
    rows = lake.sql(
        "SELECT policy_version, count(*) FROM experiences WHERE source = 'served' GROUP BY 1"
    )
    assert {0, 3} <= {version for version, _ in rows.fetchall()}

    one = CONFIG.replace("name: load", "name: one").partition("model:")[0]
    served = Served(tmp_path, config=one + "model: {run: load, version: 3}\nalgorithm: sft\n")
    with httpx.Client(base_url=served.url, timeout=60) as client:
        assert client.post("/v1/chat/completions", json={"messages": [USER]}).is_success
    assert served.end() == 0
    rows = lake.sql("SELECT policy_version FROM experiences WHERE run_id = 'one:serve'")
    assert rows.fetchall() == [(0,)], "the model that `one` starts from"
