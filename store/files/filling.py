"""What a SELECT leaves out is filled in: ids, messages, groups, and the tasks of experiences."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ..ids import content_id, row_digests
from ..query import literal
from ..records import Message, Task
from ..schema import TABLES, Column
from ..store import Store
from .columns import RowError, values_of, with_column

TEXT, INT, REAL = pa.string(), pa.int64(), pa.float64()
_IN_CHUNK = 500


@dataclass(frozen=True)
class Defaults:
    """What holds for all rows of a file that do not say otherwise."""

    taskset: str
    split: str = "train"


Fill = Callable[[pa.Table], pa.Table]
"""Takes rows of the SELECT, typed as declared; returns rows with everything filled in."""


def task_columns() -> tuple[Column, ...]:
    """Return the columns that a SELECT for tasks may give."""
    return TABLES["tasks"].columns


def experience_columns(given: Sequence[str]) -> tuple[Column, ...]:
    """Return what a SELECT for experiences may give: without task_id, the task's columns too."""
    own = TABLES["experiences"].columns
    if "task_id" in given:
        return own
    names = {c.name for c in own}
    return (*own, *(c for c in task_columns() if c.name not in names))


def fill_tasks(rows: pa.Table, defaults: Defaults) -> pa.Table:
    """Fill in `messages` from `prompt_text` or the reverse, the set, the split, and the id."""
    made = [_task(row, i, defaults).row() | _given(row) for i, row in enumerate(rows.to_pylist())]
    kinds = {c.name: c.type for c in task_columns()}
    if "created_at" not in rows.column_names:
        del kinds["created_at"]
    return pa.Table.from_pylist(made, pa.schema(list(kinds.items())))


def _given(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if v is not None}


def _task(row: dict[str, Any], place: int, defaults: Defaults) -> Task:
    text, prompt = row.get("messages"), row.get("prompt_text")
    if text is None and prompt is None:
        raise RowError(place, "a task needs `prompt_text` or `messages`, got neither")
    metadata = row.get("metadata")
    return Task(
        messages=json.loads(text) if text is not None else [{"role": "user", "content": prompt}],
        answer=row.get("answer"),
        taskset=row.get("taskset") or defaults.taskset,
        split=row.get("split") or defaults.split,
        workflow=row.get("workflow"),
        metadata=json.loads(metadata) if metadata else None,
    )


@dataclass(frozen=True)
class _Conversation:
    """A row's conversation: what was asked, and what was answered, when that is known."""

    prompt: list[Message]
    response: list[Message]

    @property
    def messages(self) -> list[Message]:
        return [*self.prompt, *self.response]


class ExperienceFill:
    """Fills in experiences, in order; remembers how many rows each group has, and each content."""

    def __init__(self, store: Store, defaults: Defaults) -> None:
        self._store, self._defaults = store, defaults
        self._groups: Counter[str] = Counter()
        self._contents: Counter[str] = Counter()

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Return the rows with everything filled in."""
        return self.with_tasks(rows)[1]

    def with_tasks(self, rows: pa.Table) -> tuple[list[Task], pa.Table]:
        """Return the tasks of rows that name none, and the rows with everything filled in."""
        tasks: list[Task] = []
        if "task_id" in rows.column_names:
            talks = self._talks_of_stored(rows)
        else:
            talks = [_talk(row, i) for i, row in enumerate(rows.to_pylist())]
            tasks = self._tasks(rows, talks)
            rows = with_column(rows, "task_id", (t.task_id for t in tasks), TEXT)
            own = TABLES["experiences"].names
            rows = rows.select([n for n in rows.column_names if n in own])
        rows = self._with_ids(rows)
        return tasks, _with_texts(rows, talks)

    def _tasks(self, rows: pa.Table, talks: Sequence[_Conversation | None]) -> list[Task]:
        answer, workflow = values_of(rows, "answer"), values_of(rows, "workflow")
        taskset, split = values_of(rows, "taskset"), values_of(rows, "split")
        tasks = []
        for i, talk in enumerate(talks):
            if talk is None:
                raise RowError(i, "an experience needs `task_id`, `prompt_text` or `messages`")
            tasks.append(
                Task(
                    messages=talk.prompt,
                    answer=answer[i],
                    taskset=taskset[i] or self._defaults.taskset,
                    split=split[i] or self._defaults.split,
                    workflow=workflow[i],
                )
            )
        return tasks

    def _talks_of_stored(self, rows: pa.Table) -> list[_Conversation | None]:
        """Return each row's conversation, from the stored task when the row has only a response."""
        asks = [i for i, row in enumerate(values_of(rows, "messages")) if row is None]
        ids = values_of(rows, "task_id")
        for i, task_id in enumerate(ids):
            if task_id is None:
                raise RowError(i, "column `task_id` is NULL; each row must name its task")
        stored = look_up(self._store, "tasks", "task_id", {ids[i] for i in asks}, ["messages"])
        talks = []
        for i, row in enumerate(rows.select(_TALK & set(rows.column_names)).to_pylist()):
            task = stored.get(ids[i])
            if row.get("messages") is None and row.get("prompt_text") is None and task is None:
                raise RowError(
                    i,
                    f"task {ids[i]!r} is not stored; import the tasks first, or give `prompt_text` "
                    "and leave `task_id` out",
                )
            talks.append(_talk(row, i, None if task is None else json.loads(task["messages"])))
        return talks

    def _with_ids(self, rows: pa.Table) -> pa.Table:
        """Fill in experience_id, group_id, rollout and source."""
        tasks, groups = values_of(rows, "task_id"), values_of(rows, "group_id")
        groups = [g if g is not None else t for g, t in zip(groups, tasks, strict=True)]
        rollouts, ids = values_of(rows, "rollout"), values_of(rows, "experience_id")
        contents = row_digests(rows.drop_columns({"created_at"} & set(rows.column_names)))
        for i, (group, content) in enumerate(zip(groups, contents, strict=True)):
            if rollouts[i] is None:
                rollouts[i] = self._groups[group]
            self._groups[group] += 1
            if ids[i] is None:
                self._contents[content] += 1
                again = self._contents[content]
                ids[i] = f"imported/{content}" + (f"/{again}" if again > 1 else "")
        rows = with_column(rows, "group_id", groups, TEXT)
        rows = with_column(rows, "rollout", rollouts, INT)
        rows = with_column(rows, "experience_id", ids, TEXT)
        return with_column(
            rows, "source", (s or "imported" for s in values_of(rows, "source")), TEXT
        )


_TALK = {"messages", "prompt_text", "response_text"}


def _talk(
    row: dict[str, Any], place: int, asked: list[Message] | None = None
) -> _Conversation | None:
    """Tell question from answer: the answer is the last assistant message, or `response_text`."""
    said = row.get("response_text")
    answer = [] if said is None else [{"role": "assistant", "content": said}]
    if row.get("messages") is None:
        prompt = row.get("prompt_text")
        if asked is None and prompt is None:
            return None
        return _Conversation(asked or [{"role": "user", "content": prompt}], answer)
    messages: list[Message] = json.loads(row["messages"])
    if messages[-1]["role"] != "assistant":
        return _Conversation(messages, answer)
    if len(messages) == 1:
        raise RowError(place, "column `messages` holds an answer and no question")
    return _Conversation(messages[:-1], messages[-1:])


def _with_texts(rows: pa.Table, talks: Sequence[_Conversation | None]) -> pa.Table:
    """Fill in messages, prompt_text, response_text and num_turns."""
    whole: list[str | None] = []
    prompts, responses = values_of(rows, "prompt_text"), values_of(rows, "response_text")
    turns = values_of(rows, "num_turns")
    for i, talk in enumerate(talks):
        whole.append(json.dumps(talk.messages, ensure_ascii=False) if talk else None)
        if talk is None:
            continue
        if prompts[i] is None:
            prompts[i] = _text(m for m in talk.prompt if m["role"] == "user")
        if responses[i] is None:
            responses[i] = _text(talk.response)
        if turns[i] is None:
            turns[i] = sum(m["role"] == "assistant" for m in talk.messages)
    rows = with_column(rows, "messages", whole, TEXT)
    rows = with_column(rows, "prompt_text", prompts, TEXT)
    rows = with_column(rows, "response_text", responses, TEXT)
    return with_column(rows, "num_turns", turns, INT)


def _text(messages: Any) -> str | None:
    """Return the text of the last message, when it is text."""
    last = None
    for message in messages:
        last = message.get("content")
    return last if isinstance(last, str) else None


def fill_preferences(rows: pa.Table, store: Store) -> pa.Table:
    """Fill in the id, and task and margin from the two experiences, which must be stored."""
    chosen, rejected = values_of(rows, "chosen_id"), values_of(rows, "rejected_id")
    wanted = {i for i in (*chosen, *rejected) if i is not None}
    stored = look_up(store, "experiences", "experience_id", wanted, ["task_id", "reward"])
    ids, tasks = values_of(rows, "preference_id"), values_of(rows, "task_id")
    margins = values_of(rows, "margin")
    sources = [s or "imported" for s in values_of(rows, "source")]
    for i, (better, worse) in enumerate(zip(chosen, rejected, strict=True)):
        if better is not None and better == worse:
            raise RowError(i, f"`chosen_id` and `rejected_id` are both {better!r}")
        good, bad = (
            _member(stored, better, "chosen_id", i),
            _member(stored, worse, "rejected_id", i),
        )
        tasks[i] = good["task_id"] if tasks[i] is None else tasks[i]
        if {good["task_id"], bad["task_id"]} != {tasks[i]}:
            raise RowError(i, f"{better!r} and {worse!r} are not two tries at task {tasks[i]!r}")
        if margins[i] is None and None not in (good["reward"], bad["reward"]):
            margins[i] = good["reward"] - bad["reward"]
        ids[i] = content_id(better, worse, sources[i]) if ids[i] is None else ids[i]
    for name, values, kind in (
        ("preference_id", ids, TEXT),
        ("task_id", tasks, TEXT),
        ("margin", margins, REAL),
        ("source", sources, TEXT),
    ):
        rows = with_column(rows, name, values, kind)
    return rows


def _member(
    stored: dict[str, dict[str, Any]], experience_id: str | None, column: str, place: int
) -> dict[str, Any]:
    if experience_id is None:
        raise RowError(
            place, f"column `{column}` is missing; a pair needs `chosen_id` and `rejected_id`"
        )
    if experience_id not in stored:
        raise RowError(place, f"`{column}` {experience_id!r} is not stored; import that first")
    return stored[experience_id]


def look_up(
    store: Store, table: str, key: str, wanted: set[str], columns: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Read the rows of a table that have the wanted ids, by id."""
    found: dict[str, dict[str, Any]] = {}
    ids = sorted(wanted)
    for i in range(0, len(ids), _IN_CHUNK):
        quoted = ", ".join(literal(v) for v in ids[i : i + _IN_CHUNK])
        rows = store.dataset(table).to_table(columns=[key, *columns], filter=f"{key} IN ({quoted})")
        found |= {row[key]: row for row in rows.to_pylist()}
    return found
