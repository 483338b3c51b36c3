"""New tasks from a model: what is kept, what is refused and why, and that it always ends."""

import asyncio
import json
import shlex
from pathlib import Path

import pytest
from support.builders import line_of, task

from rlake.loop.cli import run_command
from rlake.loop.config import TasksConfig
from rlake.loop.tasks.prepare import prepare_tasks
from rlake.loop.tasks.synthesis import Proposed, propose
from rlake.operators.chat_client import Messages
from rlake.store import Store, connect
from rlake.store.errors import ConfigError

THEMES = ("apples", "trains", "candles", "rivers", "coins", "ladders", "paper", "clouds", "wolves")


def line(question: object, answer: object = "4") -> str:
    return json.dumps({"question": question, "answer": answer})


class Scripted:
    """Answers request after request from a list, and then the last again."""

    def __init__(self, *replies: str) -> None:
        self.replies, self.asked = list(replies), []  # type: ignore[var-annotated]

    async def __call__(self, messages: Messages) -> str:
        self.asked.append(messages)
        return self.replies[min(len(self.asked), len(self.replies)) - 1]


@pytest.fixture
def seeded(store: Store) -> Store:
    store.append("tasks", [task(i) for i in range(3)])
    return store


def proposed(store: Store, ask: Scripted, number: int = 3, **options: object) -> Proposed:
    settings = {
        "taskset": "new",
        "per_request": 2,
        "max_concurrency": 1,
        "by": "scripted",
        **options,
    }
    return propose(store, ask, number=number, **settings)  # type: ignore[arg-type]


def told(store: Store) -> list[str]:
    rows = store.sql("SELECT reason FROM drops WHERE operator = 'propose' ORDER BY reason")
    return [reason for (reason,) in rows.fetchall()]


def test_proposals_are_kept_when_they_are_complete_and_new(seeded: Store) -> None:
    ask = Scripted(
        f"<think>{{}}</think>Here they are:\n{line('Two trains meet. How many wheels?', 8)}\n"
        f"{line('2+2=')}\n{line('  2 + 2= ')}",
        f"[{line('Two trains meet. How many wheels??', 9)}, {line('Why?', None)}, {line(None)}]",
        "no idea",
        line("Candles burn for three hours each. How long do nine burn?", 27.5),
    )
    done = proposed(seeded, ask, 2, attempts=9)
    stored = seeded.sql(
        "SELECT prompt_text, answer, taskset, split, metadata FROM tasks WHERE taskset = 'new' "
        "ORDER BY answer"
    ).fetchall()
    assert stored == [
        (
            "Candles burn for three hours each. How long do nine burn?",
            "27.5",
            "new",
            "train",
            '{"proposed_by": "scripted"}',
        ),
        ("Two trains meet. How many wheels?", "8", "new", "train", '{"proposed_by": "scripted"}'),
    ]
    assert (done.stored, done.requests) == (2, 4)
    reasons = told(seeded)
    assert [r.partition(":")[0] for r in reasons] == [
        "it is like another",
        "it is there already",
        "it is there already",
        "no JSON object in the reply",
        "no answer",
        "no question",
    ]
    [(rows_in, rows_out, dropped)] = seeded.sql(
        "SELECT rows_in, rows_out, rows_dropped FROM lineage"
    ).fetchall()
    assert (rows_in, rows_out, dropped) == (8, 2, 6)
    first = ask.asked[0][0]["content"]
    assert '{"question": "0+0=", "answer": "0"}' in first
    assert "with 2 lines" in first


def test_a_model_that_says_the_same_for_ever_is_asked_so_often_and_no_more(seeded: Store) -> None:
    ask = Scripted(line("Where do the nine wolves sleep tonight?"))
    done = proposed(seeded, ask, 5, attempts=4)
    assert (done.stored, done.requests, len(ask.asked)) == (1, 4, 4)
    assert sum(done.refused.values()) == 3


def test_a_request_that_fails_or_hangs_costs_that_request(seeded: Store) -> None:
    calls = []

    async def ask(messages: Messages) -> str:
        calls.append(messages)
        if len(calls) == 1:
            raise OSError("no route")
        if len(calls) == 2:
            await asyncio.Event().wait()
        return line(f"Of {len(calls)} rivers that {THEMES[len(calls)]} cross, which is longest?")

    done = propose(
        seeded,
        ask,
        taskset="new",
        number=1,
        max_concurrency=2,
        timeout=0.2,
        attempts=4,
        per_request=1,
    )
    assert (done.stored, done.requests) == (1, 4)
    assert told(seeded)[:2] == [
        f"the request failed: OSError: no route {line_of(__file__, 'no route')}",
        "the request failed: TimeoutError: it took longer than 0.2 s",
    ]


def test_the_same_call_goes_on_with_what_is_there(seeded: Store) -> None:
    replies = [line(f"How do {name} count to {len(name)} and {name[::-1]}?") for name in THEMES]
    first = proposed(seeded, Scripted(*replies), 3)
    again = proposed(seeded, Scripted(*replies), 5)
    assert (first.stored, again.already, again.stored) == (3, 3, 2)
    done = proposed(seeded, Scripted("never asked"), 5)
    assert (done.requests, done.stored, done.already) == (0, 0, 5)


def test_without_an_example_nothing_is_asked(store: Store) -> None:
    with pytest.raises(ConfigError, match="no task with a prompt and an answer matches"):
        proposed(store, Scripted(line("x")))


async def from_a_template(messages: Messages) -> str:
    """Stands for a model: nine tasks, whatever is asked."""
    return "\n".join(line(f"How many {name} are {len(name)} of them?", 3) for name in THEMES)


async def away(messages: Messages) -> str:
    raise OSError("nobody is there")


def test_the_command_stores_new_tasks_and_says_what_it_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = connect(tmp_path / "lake")
    store.append("tasks", [task(i) for i in range(3)])
    monkeypatch.chdir(tmp_path)
    command = f"tasks generate --by {__name__}:from_a_template --taskset new -n 3 --store lake"
    assert run_command(shlex.split(command)) == 0
    out = capsys.readouterr().out
    assert "3 new tasks in " in out
    assert "`new` has 3 of 3" in out
    assert run_command(shlex.split(command.replace("from_a_template", "missing"))) == 2
    assert (
        run_command(shlex.split(command.replace("from_a_template", "away").replace("new", "no")))
        == 1
    )
    assert "the request failed; the request failed: OSError: nobody is there" in (
        capsys.readouterr().err
    )
    assert run_command([*shlex.split(command), "--by", "{url: x"]) == 2
    assert "`--by {url: x` is not valid YAML" in capsys.readouterr().err


def test_half_a_character_of_a_proposal_is_a_question_mark(seeded: Store) -> None:
    half = '{"question": "Why \\ud83d is it?", "answer": "4"}'
    assert proposed(seeded, Scripted(half), number=1).stored == 1
    rows = seeded.sql("SELECT prompt_text FROM tasks WHERE prompt_text LIKE 'Why%'").fetchall()
    assert rows == [("Why ? is it?",)]


def test_a_maker_by_sql_gives_a_grid_of_tasks(store: Store) -> None:
    sql = "SELECT a || '+' || b AS prompt_text, a + b AS answer FROM range(3) x(a), range(3) y(b)"
    prepare_tasks(
        store, TasksConfig(generator={"from_sql": {"sql": sql, "taskset": "grid", "held_out": 2}})
    )
    counts = store.sql("SELECT split, count(*) FROM tasks GROUP BY split ORDER BY split").fetchall()
    assert counts == [("eval", 2), ("train", 7)]
