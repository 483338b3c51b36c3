"""Hindsight relabeling: a failed rollout is a success at the task that it solved."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..store.errors import OperatorError
from ..store.records import Experience, Task
from . import derived_rows
from .body import FrameFunction
from .decorator import operator
from .import_path import import_from
from .scoring import task_of

Relabel = Callable[[Task, Experience], Task | None]
"""Returns the task that a rollout solved; None if there is none other than its own."""


@operator("augment", reads=derived_rows.READS, reads_all=True, scope="row")
def hindsight(*, relabel: str | Relabel = "achieved_goal", reward: float = 1.0) -> FrameFunction:
    """Add each rollout again as a success at the task that it solved (HER, arXiv:1707.01495).

    `relabel` is a function `(task, experience) -> Task | None`, or `package.module:function`. The
    new row has that task's question, the same replies, and the reward `reward`; its source is
    `synthetic`, and it has no tokens, since the policy never saw this question. This is for tasks
    with a goal: a wrong answer to a sum is rarely the answer to a useful other sum.

    `achieved_goal`, the default, takes goals from metadata, named as in Gymnasium: the task's
    `desired_goal` (column `task_metadata`, or else the row's `metadata`) and the row's
    `achieved_goal`. A rollout whose question does not name its goal, or whose replies do, is left
    out, since its text would not fit the new goal.

    >>> import polars as pl
    >>> rows = pl.DataFrame({"experience_id": ["a"], "task_id": "t", "messages": None,
    ...     "prompt_text": "Go to the lake.", "response_text": "left, left", "reward": 0.0,
    ...     "metadata": '{"desired_goal": "the lake", "achieved_goal": "the mill"}'},
    ...     schema_overrides={"messages": pl.String})
    >>> rows.pipe(hindsight()).select("prompt_text", "response_text", "reward").row(1)
    ('Go to the mill.', 'left, left', 1.0)
    """
    function = _function(relabel)

    def again(row: derived_rows.ParentRow) -> derived_rows.Made:
        conversation = derived_rows.conversation(row)
        if not conversation or conversation[-1].get("role") != "assistant":
            return None
        asked = derived_rows.question(row, conversation)
        own = _task(row, asked)
        solved = function(own, Experience.from_row({**row, "messages": json.dumps(conversation)}))
        if solved is None or solved.task_id == own.task_id:
            return None
        if not isinstance(solved, Task):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OperatorError(f"`relabel` returned a {type(solved).__name__}, expected a Task")
        messages, known = [*solved.messages, *conversation[len(asked) :]], solved.metadata
        return {
            **derived_rows.retold(messages, source="synthetic", reward=reward),
            "task_id": solved.task_id,
            "answer": solved.answer,
            "task_messages": json.dumps(list(solved.messages), ensure_ascii=False),
            "task_metadata": _json(solved.metadata),
            "metadata": _json({**json.loads(row.get("metadata") or "{}"), **known})
            if known
            else None,
        }

    return lambda frame: derived_rows.new_rows(frame, again)


def achieved_goal(task: Task, experience: Experience) -> Task | None:
    """Return the task whose goal was achieved: the same words with the goal replaced.

    >>> asked = Task.ask("Fetch tea.", metadata={"desired_goal": "tea"})
    >>> tried = Experience(task_id="t", response_text="ok", metadata={"achieved_goal": "milk"})
    >>> achieved_goal(asked, tried).prompt_text
    'Fetch milk.'
    """
    known = {**(experience.metadata or {}), **(task.metadata or {})}
    wanted, got = known.get("desired_goal"), (experience.metadata or {}).get("achieved_goal")
    if wanted is None or got is None or wanted == got:
        return None
    old, new = _words(wanted), _words(got)
    replies = (experience.messages or ())[len(task.messages) :]
    asked = [m for m in task.messages if old in str(m.get("content"))]
    # replies that name the old goal would contradict the new question
    if not old or not asked or any(old in json.dumps(m, ensure_ascii=False) for m in replies):
        return None
    messages = [
        {**m, "content": m["content"].replace(old, new)} if m in asked else m for m in task.messages
    ]
    metadata = {**(task.metadata or {}), "desired_goal": got}
    answer = new if task.answer == old else None
    return replace(task, messages=messages, answer=answer, metadata=metadata)


def _function(relabel: str | Relabel) -> Relabel:
    if not isinstance(relabel, str):
        return relabel
    if relabel == "achieved_goal":
        return achieved_goal
    if ":" not in relabel:
        raise OperatorError(
            f"unknown relabeling `{relabel}`; name `achieved_goal`, or your own as "
            "`package.module:function`"
        )
    return import_from(relabel, "relabeling", error=OperatorError)


def _task(row: Mapping[str, Any], asked: list[dict[str, Any]]) -> Task:
    taskset, split = row.get("taskset") or "hindsight", row.get("split") or "train"
    return replace(task_of(row), messages=asked, taskset=taskset, split=split)


def _words(goal: object) -> str:
    return goal if isinstance(goal, str) else json.dumps(goal, ensure_ascii=False)


def _json(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(dict(value), ensure_ascii=False)
