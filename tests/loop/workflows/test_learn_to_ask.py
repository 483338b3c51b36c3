"""Logs of an expert become tasks of what to ask next; questions are rewarded by what follows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.rollouts import rollouts, script

from rlake.loop import cli
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.recipes.toys import talk_tasks, talks
from rlake.operators import question_tasks
from rlake.pipelines import Pipeline
from rlake.store import Experience, Task, connect

TASKS = list(talk_tasks())
ASK = next(t for t in TASKS if (t.metadata or {})["ask"]["decision"] == "continue")
STOP = next(t for t in TASKS if (t.metadata or {})["ask"]["decision"] == "stop")


def asked(task: Task, said: str, *, judge: Any = None, **given: Any) -> Experience:
    models = {"judge": judge} if judge else {}
    [row] = rollouts(ScriptedPolicy([said]), {"learn_to_ask": given}, task, models=models)
    return row


def test_each_reply_to_a_user_is_a_task_with_what_was_found_out_later() -> None:
    talk = [
        *({"role": "user", "content": text} for text in ("I cough.", "Badly.")),
        {"role": "assistant", "content": "Since when?"},
        {"role": "user", "content": "Two days."},
        {"role": "assistant", "content": "Take syrup."},
        {"role": "assistant", "content": "Get well."},
    ]
    logs = {"experience_id": ["a", "b"], "task_id": "t", "prompt_text": None, "response_text": None}
    texts = [json.dumps(talk), json.dumps(talk[:1])]
    rows = pl.DataFrame(logs | {"messages": texts}, schema_overrides=dict.fromkeys(logs, pl.String))
    applied = question_tasks(taskset="cough").apply(rows)
    first, second = [Task.from_row(row) for row in applied.rows.iter_rows(named=True)]
    assert first.prompt_text == "I cough.\nBadly."
    later = "assistant: Since when?\nuser: Two days.\nassistant: Take syrup.\nGet well."
    assert (first.metadata or {})["ask"] == {"decision": "continue", "information": later}
    assert (first.answer, second.answer, first.taskset) == ("Since when?", "<stop />", "cough")
    assert (second.metadata or {})["ask"] == {"decision": "stop", "information": ""}
    assert applied.dropped.rows() == [("b", "no user is answered in it")]


def test_a_pipeline_makes_tasks_of_stored_conversations(tmp_path: Path) -> None:
    store = connect(tmp_path / "lake")
    store.append("experiences", list(talks())[:4])
    pipeline = """
        name: questions
        source: {sql: "SELECT * FROM experiences WHERE source = 'imported'"}
        operators: [question_tasks]
        sink: {table: tasks}
        """
    Pipeline.from_yaml(pipeline).run(store)
    counted = store.sql("SELECT count(*), count(DISTINCT task_id) FROM tasks WHERE taskset = 'ask'")
    assert counted.fetchall()[0][0] > 4


@pytest.mark.parametrize(
    ("task", "said", "scores", "product", "total"),
    [
        (ASK, "In which month do you travel?", (1, 1, 1), 4.0, 3.0),
        (ASK, "Tell me the month.", (1, 1, 0), 3.0, 2.0),
        (ASK, "Are you ill?", (1, 0, 1), 2.0, 2.0),
        (ASK, "<stop />", (0, 0, 0), 0.0, 0.0),
        (STOP, "<stop />", (1, 1, 1), 4.0, 3.0),
        (STOP, "Bye. <stop />", (1, 1, 0), 3.0, 2.0),
        (STOP, "And how many are you?", (0, 0, 0), 0.0, 0.0),
    ],
)
def test_the_reward_is_that_of_the_authors(
    task: Task, said: str, scores: tuple[float, ...], product: float, total: float
) -> None:
    row = asked(task, said)
    found = [row.metrics[f"ask/{name}"] for name in ("decision", "content", "format")]
    assert (tuple(found), row.reward) == (scores, product)
    assert asked(task, said, fusion="sum").reward == total


def test_a_judge_scores_a_question_by_what_was_told_later() -> None:
    judge, heard = script("content: 0.5\nformat: 1")
    row = asked(ASK, "Do you like June?", judge=judge)
    assert (row.reward, row.metrics["ask/content"]) == (3.0, 0.5)
    assert str((ASK.metadata or {})["ask"]["information"]) in heard[0][0]["content"]
    judge, _ = script("A fine question.")
    assert asked(ASK, "Do you like June?", judge=judge).reward is None
    for unread in ("content: 0.7\nformat: 1", "content: 1.5\nformat: 1", "content: -1\nformat: 1"):
        judge, _ = script(unread)
        assert asked(ASK, "Do you like June?", judge=judge).reward is None
    judge, _ = script("**content**: 0.50\nformat: 1.0.")
    assert asked(ASK, "Do you like June?", judge=judge).metrics["ask/content"] == 0.5
    judge, heard = script("content: 1\nformat: 1")
    assert (asked(ASK, "<stop />", judge=judge).reward, heard) == (0.0, [])


def test_a_task_of_another_kind_is_refused_with_the_operator_that_makes_them() -> None:
    row = asked(replace(ASK, metadata={"ask": {"decision": "perhaps"}}), "?")
    assert "the operator `question_tasks` makes such tasks" in str(row.drop_reason)


@pytest.mark.slow
def test_the_recipe_runs_on_the_engine(tmp_path: Path) -> None:
    store = connect(tmp_path / "lake")
    short = ["trainer.steps=1", "trainer.batch_size=1", "explorer.sampling.max_tokens=8"]
    words = [word for text in [*short, "evaluate=null"] for word in ("--set", text)]
    assert cli.run_command(["run", "learn_to_ask", "--store", store.uri, *words]) == 0
    rows = store.sql("SELECT count(*), count(reward) FROM experiences").fetchall()
    assert rows == [(8, 8)]
