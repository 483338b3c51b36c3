"""Task generators: SQL, and datasets of the package `verifiers`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import polars as pl

from ...operators.body import evaluate
from ...store.errors import SchemaError, nearest
from ...store.records import Message, Task
from ..environments.verifiers import loaded


def from_sql(
    *, sql: str, taskset: str = "default", held_out: int = 0, seed: int = 0
) -> Iterator[Task]:
    """Yield a task for each row of one SELECT with the columns `prompt_text` and `answer`.

    DuckDB's `range` makes a grid, and `format` or `||` fills a template. Other columns become the
    metadata. `held_out` random tasks have the split `eval`.

    >>> sql = "SELECT format('{}*{}=', a, b) AS prompt_text, a * b AS answer, a AS times " \\
    ...     "FROM range(2, 4) x(a), range(5) y(b)"
    >>> tasks = list(from_sql(sql=sql))
    >>> len(tasks), tasks[-1].prompt_text, tasks[-1].answer, tasks[-1].metadata
    (10, '3*4=', '12', {'times': 3})

    Raises QueryError if it is not a SELECT, SchemaError if a column is missing.
    """
    # in a fixed order, or `held_out` would choose other tasks each time
    rows = evaluate(f"SELECT * FROM ({sql}\n) ORDER BY ALL", pl.DataFrame({"nothing": []}))
    for name in ("prompt_text", "answer"):
        if name not in rows.columns:
            raise SchemaError(f"the SELECT has no column `{name}`{nearest(name, rows.columns)}")
    held = set(np.random.default_rng(seed).permutation(rows.height)[:held_out].tolist())
    for i, row in enumerate(rows.to_dicts()):
        prompt, answer = row.pop("prompt_text"), row.pop("answer")
        split = "eval" if i in held else "train"
        message = None if answer is None else str(answer)
        yield Task.ask(str(prompt), message, taskset=taskset, split=split, metadata=row or None)


def verifiers_tasks(
    *,
    environment: str,
    arguments: Mapping[str, Any] | None = None,
    most: int = -1,
    taskset: str = "verifiers",
) -> Iterator[Task]:
    """Yield the questions of an environment of verifiers, `most` of each split; -1 takes all.

    Those of its `eval_dataset` have the split `eval`.
    """
    world = loaded(environment, arguments)
    for split, rows in (("train", world.dataset), ("eval", world.eval_dataset)):
        if rows is None:
            continue
        for row in rows if most < 0 else rows.select(range(min(most, len(rows)))):
            yield _task(dict(row), split, taskset)


def _task(row: Mapping[str, Any], split: str, taskset: str) -> Task:
    prompt = row["prompt"]
    messages: list[Message] = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else [{k: v for k, v in message.items() if v is not None} for message in prompt]
    )
    info = row.get("info") or {}
    return Task(
        messages=messages,
        answer=row.get("answer") or None,
        taskset=taskset,
        split=split,
        metadata={
            "task": row.get("task", "default"),
            "example_id": row.get("example_id", 0),
            "info": json.loads(info) if isinstance(info, str) else dict(info),
        },
    )
