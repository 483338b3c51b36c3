"""Queries that run in a DuckDB of their own: right ones, wrong ones, and those that do harm."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from rlake.loop.environments import sql
from rlake.loop.environments.environment import Step
from rlake.loop.environments.sql import same_rows
from rlake.store import Task
from rlake.store.errors import JobError

PEOPLE = [{"name": "Ada", "age": 36}, {"name": "Ben", "age": 20}, {"name": "O'Hara", "age": 51}]
TASK = Task.ask(
    "How many are older than 30?",
    "SELECT count(*) FROM people WHERE age > 30",
    metadata={"tables": {"people": PEOPLE}},
)


def asked(task: Task, answers: Sequence[str], **parameters: float) -> tuple[str, list[Step]]:
    """Answer with queries; return what is shown first, and each step."""

    async def ask() -> tuple[str, list[Step]]:
        environment = sql(**parameters)
        try:
            shown = await environment.reset(task)
            steps = [
                await environment.step({"role": "assistant", "content": said}) for said in answers
            ]
        finally:
            await environment.close()
        return shown, steps

    return asyncio.run(ask())


def test_errors_and_results_are_shown_until_a_query_gives_what_was_asked_for() -> None:
    right = "```sql\nSELECT count(*) AS n FROM people WHERE age >= 31;\n```"
    said = ["SELECT count(*) FROM peple", "SELECT name, age FROM people WHERE age > 40", right]
    shown, [typo, wrong, last] = asked(TASK, said, again=0.5)
    assert "people(name VARCHAR, age INTEGER)" in shown
    assert 'Did you mean "people"?' in str(typo.shown)
    assert typo.metrics == {"sql/errors": 1.0}
    assert str(wrong.shown).startswith("name | age\nO'Hara | 51\n")
    assert (wrong.reward, wrong.is_done) == (0.0, False)
    assert (last.reward, last.is_done) == (0.25, True)


def test_a_query_reaches_no_file_no_setting_and_nothing_but_reads() -> None:
    said = [
        "SELECT * FROM read_csv('/etc/passwd')",
        "COPY people TO '/tmp/people.csv'",
        "DROP TABLE people",
        "SET threads = 8",
        "SELECT 1; DELETE FROM people",
        "SELECT list_sum(range(1000000000))",
        "SELECT repeat('a', 1000000000)",
        str(TASK.answer),
    ]
    _, steps = asked(TASK, said, max_queries=20)
    reasons = ["are disabled", "got COPY", "got DROP", "got SET", "got SELECT then DELETE"]
    reasons += ["Out of Memory", "Out of Memory"]
    for step, reason in zip(steps, reasons, strict=False):
        assert reason in str(step.shown)
        assert step.metrics == {"sql/errors": 1.0}
    assert steps[-1].reward == 1.0


def test_a_query_without_end_is_ended_and_the_next_is_answered() -> None:
    endless = "WITH RECURSIVE x AS (SELECT 1 n UNION ALL SELECT n + 1 FROM x) SELECT sum(n) FROM x"
    began = time.perf_counter()
    _, [late, right] = asked(TASK, [endless, str(TASK.answer)], seconds=0.5)
    assert late.shown == "the query took longer than 0.5 s"
    assert right.reward == 1.0
    assert time.perf_counter() - began < 60


def test_a_task_without_tables_or_with_a_broken_answer_says_so() -> None:
    with pytest.raises(JobError, match="neither `schema` nor `tables`"):
        asked(Task.ask("?", "SELECT 1"), [])
    with pytest.raises(JobError, match="the tables of the task cannot be made: Parser Error"):
        asked(Task.ask("?", "SELECT 1", metadata={"schema": "CREATE people"}), [])


def test_the_order_of_rows_counts_only_where_it_was_asked_for() -> None:
    one, other = [[1, "a"], [2, None]], [[2, None], [1.0000001, "a"]]
    assert same_rows(one, other, ordered=False)
    assert not same_rows(one, other, ordered=True)
    assert not same_rows(one, [*other, [1, "a"]], ordered=False)
