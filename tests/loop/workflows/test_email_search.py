"""Questions about an inbox, which are answered with tools over a table of mails."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.rollouts import rollouts, script

from rlake.loop import cli
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.recipes.toys import mail_questions, mails
from rlake.store import Experience, Task, connect

MAILS = {"rlake.loop.recipes.toys:mails": {"count": 30}}
TASK = next(mail_questions(count=30, held_out=0))
ASKED = {"email_search": {"mails": MAILS, "max_turns": 4}}


def call(name: str, **arguments: Any) -> str:
    made = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{made}\n</tool_call>"


SEARCH = call("search_mails", words="hiring meeting", sent_before="2025-01-31")


def answered(
    policy: ScriptedPolicy,
    workflow: dict[str, Any] | None = None,
    task: Task = TASK,
    **changes: Any,
) -> Experience:
    """The last row of a rollout."""
    rewards = {} if "models" in changes else {"rewards": "numeric_answer"}
    return rollouts(policy, workflow or ASKED, task, **rewards, **changes)[-1]


def results(row: Experience) -> list[str]:
    return [str(m["content"]) for m in row.messages or () if m["role"] == "tool"]


def test_a_mail_is_found_read_and_answered_from() -> None:
    policy, _ = script(SEARCH, call("read_mail", mail_id="m000"), "It is room 29.")
    row = answered(policy)
    found, mail = results(row)
    assert found.splitlines()[0] == "m000: 2025-01-06, dan@example.com, hiring meeting"
    assert mail.startswith("from: dan@example.com\nto: ada@example.com\ndate: 2025-01-06\n")
    assert mail.endswith("is in room 29 at 16:00.")
    assert (row.reward, row.metrics["mails/found"]) == (1.0, 1.0)
    assert [tool["function"]["name"] for tool in row.tools or ()] == ["search_mails", "read_mail"]


def test_days_limit_a_search_and_mails_of_others_are_hidden() -> None:
    late = call("search_mails", words="hiring", sent_after="2026-01-01")
    wrong = call("search_mails", words="hiring", sent_after="yesterday")
    policy, _ = script(late, wrong, call("read_mail", mail_id="m009"), "29")
    row = answered(policy)
    nothing, unfit, hidden = results(row)
    assert nothing == "no mail was found"
    assert unfit.startswith("Error: the arguments do not fit `search_mails`: `sent_after`")
    assert hidden == "Error: no mail has the ID `m009`; `search_mails` lists ids"
    assert (row.reward, row.metrics["mails/found"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("said", "verdict", "reward"),
    [("Room 29", "Yes.", 1.0), ("Room 3", "no, it is 29", 0.0), ("Room 29", "Perhaps", None)],
)
def test_a_judge_compares_the_answer_with_the_right_one(
    said: str, verdict: str, reward: float | None
) -> None:
    judge, asked = script(verdict)
    row = answered(ScriptedPolicy([said]), models={"judge": judge})
    assert row.reward == reward
    assert f"Right answer: 29\nAnswer to judge: {said}\n" in asked[0][0]["content"]


def test_without_an_answer_the_judge_is_not_asked_and_the_reward_is_zero() -> None:
    judge, asked = script("yes")
    row = answered(ScriptedPolicy([SEARCH]), models={"judge": judge})
    assert (row.reward, asked) == (0.0, [])


def test_every_question_is_answered_by_the_mail_that_it_names_and_by_no_other(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mails.parquet"
    pl.DataFrame(mails(count=100)).write_parquet(path)
    questions = list(mail_questions(count=100))
    assert len({question.prompt_text for question in questions}) == len(questions) == 90
    assert sum(question.split == "eval" for question in questions) == 20
    [source] = (questions[50].metadata or {})["mail"]["sources"]
    workflow = {"email_search": {"mails": str(path)}}
    policy, _ = script(call("read_mail", mail_id=source), "?")
    row = answered(policy, workflow, questions[50])
    assert f"in room {questions[50].answer} at" in results(row)[0]
    pl.DataFrame({"body": ["?"]}).write_parquet(tmp_path / "bad.parquet")
    workflow = {"email_search": {"mails": str(tmp_path / "bad.parquet")}}
    assert "has no column `mail_id`" in str(answered(policy, workflow).drop_reason)


@pytest.mark.slow
def test_the_recipe_runs_on_the_engine(tmp_path: Path) -> None:
    store = connect(tmp_path / "lake")
    short = ["trainer.steps=1", "trainer.batch_size=1", "explorer.sampling.max_tokens=8"]
    words = [word for text in [*short, "evaluate=null"] for word in ("--set", text)]
    assert cli.run_command(["run", "email_search", "--store", store.uri, *words]) == 0
    assert store.sql(
        "SELECT count(*), min(reward), max(tools::VARCHAR LIKE '%search_mails%') FROM experiences"
    ).fetchall() == [(8, 0.0, True)]
