"""Questions about tables that are answered with a query, which runs in its own DuckDB.

The query runs in a process with limits on memory and time, without access to files or network.
"""

import asyncio
import json
import math
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...store.errors import JobError
from ...store.query import literal, quoted
from ...store.records import Message, Task
from .environment import Step

_WORKER = Path(__file__).with_name("sql_worker.py")
_TAGGED = re.compile(r"<sql>((?:(?!<sql>).)*?)</sql>", re.DOTALL | re.IGNORECASE)
_FENCED = re.compile(r"```(?:sql|duckdb)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
# asyncio reads lines of up to 64 KiB by default, and a reply is one line.
_LONGEST_LINE = 1 << 24
_SHOWN_ROWS = 10


class SqlEnvironment:
    """The tables of one task; each answer is a query, until one returns the expected rows.

    The task's metadata has `schema`, statements that create and fill the tables, or `tables`, rows
    by table name; and `result`, the expected rows, unless the task's answer is a query that returns
    them. The order of rows matters if `ordered` is set in the metadata.
    """

    def __init__(
        self,
        *,
        max_queries: int = 3,
        again: float = 1.0,
        seconds: float = 5.0,
        memory_mb: int = 1024,
        most_rows: int = 1000,
        shows_tables: bool = True,
        start_seconds: float = 60.0,
    ) -> None:
        """Set the limits. If the n-th query is right, its reward is `again` to the power of n - 1.

        `memory_mb` is address space, of which DuckDB may use a quarter. Set `shows_tables` to false
        if the task's prompt describes the tables.
        """
        self._max_queries, self._again, self._shows_tables = max_queries, again, shows_tables
        self._seconds, self._memory, self._most_rows = seconds, memory_mb << 20, most_rows
        self._start_seconds = start_seconds
        self._worker: Process | None = None
        self._setup, self._num_queries = "", 0
        self._expected: list[list[Any]] = []
        self._ordered = False

    async def reset(self, task: Task) -> str:
        """Create the tables and compute the expected rows; return a description of the tables."""
        await self.close()
        message = dict(task.metadata or {})
        self._setup = "\n".join(
            [str(message.get("schema", "")), *_tables(message.get("tables", {}))]
        )
        if not self._setup.strip():
            raise JobError(f"task {task.task_id} has neither `schema` nor `tables` in its metadata")
        self._ordered, self._num_queries = bool(message.get("ordered", False)), 0
        if "result" in message:
            self._expected = [list(row) for row in message["result"]]
        else:
            self._expected = (await self._right(task))["rows"]
        if not self._shows_tables:
            return ""
        found = await self._ask({"query": _COLUMNS, "rows": self._most_rows})
        tables = "\n".join(f"{name}({columns})" for name, columns in found.get("rows", ()))
        return f"Tables in DuckDB:\n{tables}\nAnswer with one SELECT."

    async def step(self, answer: Message) -> Step:
        """Run the query of an answer; the right rows end the episode, other results are shown."""
        self._num_queries += 1
        found = await self._ask(
            {"query": query_in(str(answer.get("content") or "")), "rows": self._most_rows}
        )
        is_last = self._num_queries >= self._max_queries
        if "error" in found:
            metrics = {"sql/errors": 1.0}
            return Step(shown=found["error"], reward=0.0, is_done=is_last, metrics=metrics)
        if not found["more"] and same_rows(found["rows"], self._expected, ordered=self._ordered):
            return Step(reward=self._again ** (self._num_queries - 1), is_done=True)
        shown = f"{_as_text(found)}\nThis is not what was asked for."
        return Step(shown=shown, reward=0.0, is_done=is_last, metrics={"sql/wrong": 1.0})

    async def close(self) -> None:
        """End the process."""
        worker, self._worker = self._worker, None
        if worker is not None and worker.returncode is None:
            worker.kill()
            await worker.wait()

    async def _right(self, task: Task) -> dict[str, Any]:
        if task.answer is None:
            raise JobError(f"task {task.task_id} has neither an answer nor a `result`")
        found = await self._ask({"query": task.answer, "rows": self._most_rows})
        if "error" in found or found["more"]:
            why = found.get("error", f"it gives more than {self._most_rows} rows")
            raise JobError(f"the answer of task {task.task_id} cannot be run: {why}")
        return found

    async def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the worker; one that is too slow or dies is replaced."""
        worker = self._worker or await self._started()
        try:
            return await asyncio.wait_for(_answered(worker, asked), self._seconds)
        except TimeoutError:
            # Replies have no ids: the late reply of this worker would answer the next query.
            await self.close()
            return {"error": f"the query took longer than {self._seconds:g} s"}
        except (OSError, ValueError):
            await self.close()
            return {"error": "the query took more than it may have, and was ended"}

    async def _started(self) -> Process:
        cpu = math.ceil(self._start_seconds + self._seconds * 20)
        limits = {"memory": self._memory, "cpu": cpu}
        self._worker = worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(_WORKER),
            json.dumps(limits),
            stdin=PIPE,
            stdout=PIPE,
            limit=_LONGEST_LINE,
        )
        made = await asyncio.wait_for(
            _answered(worker, {"setup": self._setup}), self._start_seconds
        )
        if "error" in made:
            raise JobError(f"the tables of the task cannot be made: {made['error']}")
        return worker


def sql(**parameters: Any) -> SqlEnvironment:
    """Tables in DuckDB that are queried, as `{sql: {max_queries: 3, seconds: 5}}`."""
    return SqlEnvironment(**parameters)


_COLUMNS = (
    "SELECT table_name, string_agg(column_name || ' ' || data_type, ', ' ORDER BY column_index) "
    "FROM duckdb_columns() WHERE NOT internal GROUP BY 1 ORDER BY 1"
)


def query_in(text: str) -> str:
    """Return the query of an answer: the last `<sql>` or fenced block, or else all of it.

    >>> query_in("First I look.\\n```sql\\nSELECT 1\\n```"), query_in(" SELECT 2; ")
    ('SELECT 1', 'SELECT 2')
    """
    found = _TAGGED.findall(text) or _FENCED.findall(text) or [text]
    return found[-1].strip().rstrip(";").strip()


def same_rows(
    rows: Sequence[Sequence[Any]], expected: Sequence[Sequence[Any]], *, ordered: bool
) -> bool:
    """Return whether results are equal: numbers to 6 digits, rows in any order unless `ordered`.

    >>> same_rows([[2, "b"], [1.0, "a"]], [[1, "a"], [2, "b"]], ordered=False)
    True
    """
    one, other = ([tuple(map(_plain, row)) for row in each] for each in (rows, expected))
    return one == other if ordered else sorted(one, key=repr) == sorted(other, key=repr)


def _plain(value: Any) -> Any:
    """Return a cell for comparison; DECIMALs arrive as text."""
    if value is None or isinstance(value, bool):
        return value
    try:
        return float(f"{float(value):.6g}")
    except ValueError:
        return str(value)


async def _answered(worker: Process, asked: Mapping[str, Any]) -> dict[str, Any]:
    assert worker.stdin is not None and worker.stdout is not None, "it was started with pipes"  # noqa: PT018
    worker.stdin.write(json.dumps(asked).encode() + b"\n")
    await worker.stdin.drain()
    return json.loads(await worker.stdout.readline())


def _tables(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    made = []
    for name, rows in tables.items():
        columns = list(rows[0]) if rows else []
        values = ", ".join(f"({', '.join(_written(row.get(c)) for c in columns)})" for row in rows)
        names = ", ".join(quoted(column) for column in columns)
        made.append(
            f"CREATE TABLE {quoted(name)} AS SELECT * FROM (VALUES {values}) AS t({names});"
        )
    return made


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "NULL", True: "true", False: "false"}[value]
    return str(value) if isinstance(value, int | float) else literal(str(value))


def _as_text(found: Mapping[str, Any]) -> str:
    lines = [" | ".join(map(str, row)) for row in (found["columns"], *found["rows"][:_SHOWN_ROWS])]
    more = len(found["rows"]) - _SHOWN_ROWS
    return "\n".join([*lines, f"and {more} more rows"] if more > 0 or found["more"] else lines)
