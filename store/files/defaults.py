"""Fill in what a SELECT omits: ids, messages, groups, and the tasks of experiences."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from ..conversation import (
    NO_ANSWER,
    goes_on,
    is_answer,
    last_answer,
    last_question,
    why_untrainable,
)
from ..ids import row_digests
from ..key_index import rows_with
from ..raw_json import dumps, elements, listed
from ..records import Message, Task
from ..schema import TABLES, Column
from ..store import Store
from .plain_text import as_messages, is_plain, joined, task_columns
from .select_columns import JSON_COLUMNS, RowError, column_of, filled, values_of, with_column
from .text_numbers import Counts, Rollouts
from .tokenize import Tokenization

TEXT, INT = pa.string(), pa.int64()


@dataclass(frozen=True)
class Defaults:
    """Default values for the rows of a file."""

    taskset: str
    split: str = "train"


def experience_columns(given: Sequence[str]) -> tuple[Column, ...]:
    """Return the columns of a SELECT for experiences: without task_id, those of tasks too."""
    own = TABLES["experiences"].columns
    if "task_id" in given:
        return own
    names = {c.name for c in own}
    return (*own, *(c for c in TABLES["tasks"].columns if c.name not in names))


def fill_tasks(rows: pa.Table, defaults: Defaults) -> pa.Table:
    """Fill in `messages` from `prompt_text` or the reverse, taskset, split and id."""
    kinds = {c.name: c.type for c in TABLES["tasks"].columns}
    if "created_at" not in rows.column_names:
        del kinds["created_at"]
    if is_plain(rows, metadata="metadata"):
        made = task_columns(rows, taskset=defaults.taskset, split=defaults.split)
        made = {n: made.get(n, pa.nulls(len(rows), kind)) for n, kind in kinds.items()}
        return _completed(rows.select([n for n in rows.column_names if n in kinds]), made)
    made = [_filled(row, i, defaults) for i, row in enumerate(rows.to_pylist())]
    return pa.Table.from_pylist(made, pa.schema(list(kinds.items())))


def _filled(row: dict[str, Any], place: int, defaults: Defaults) -> dict[str, Any]:
    """Fill in a task. Its JSON is serialized again: equal tasks have one id, so one spelling."""
    made = _task(row, place, defaults).row()
    return made | {k: v for k, v in row.items() if v is not None and k not in JSON_COLUMNS}


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
    """A row's conversation: the prompt, and the response if known."""

    prompt: list[Message]
    response: list[Message]
    text: str
    """The whole conversation as JSON, byte for byte as in the file."""
    said: str | None
    """The text of the last answer."""

    @property
    def messages(self) -> list[Message]:
        return [*self.prompt, *self.response]


class ExperienceFill:
    """Fills in experiences in order, counting the rows of each group and of each content."""

    def __init__(self, store: Store, *, tokenization: Tokenization | None = None) -> None:
        self._store, self._tokenization = store, tokenization
        self._defaults = Defaults("")
        self._rollouts, self._contents = Rollouts(store), Counts()
        self.untrainable: Counter[str] = Counter()
        """Rows that cannot be trained on, by reason."""

    def begin(self, defaults: Defaults) -> None:
        """Start a file: equal rows within a file are distinct, across files they are the same."""
        self._defaults, self._contents = defaults, Counts()

    def with_tasks(self, rows: pa.Table) -> tuple[Sequence[Task] | pa.Table, pa.Table]:
        """Return the tasks of rows without `task_id`, and the completed rows."""
        if (
            "task_id" not in rows.column_names
            and self._tokenization is None
            and is_plain(rows, metadata="task_metadata")
        ):
            return self._plain(rows)
        tasks: list[Task] = []
        if "task_id" in rows.column_names:
            conversations = self._of_stored_tasks(rows)
        else:
            conversations = [_conversation(row, i) for i, row in enumerate(_light(rows))]
            tasks = self._tasks(rows, conversations)
            rows = _of_tasks(rows, [t.task_id for t in tasks])
        rows = _with_sizes(_completed(self._with_ids(rows), _texts(conversations)))
        why_not = pa.array([why_untrainable(c.messages if c else ()) for c in conversations], TEXT)
        self.untrainable.update(_untrainable(rows, why_not))
        if self._tokenization is not None:
            rows = self._tokenization.fill(rows, [t.messages if t else [] for t in conversations])
        return tasks, rows

    def _plain(self, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Return the tasks of rows of plain text, and the completed rows, column by column."""
        defaults = self._defaults
        tasks = task_columns(rows, taskset=defaults.taskset, split=defaults.split)
        responses = column_of(rows, "response_text")
        texts = {
            "messages": as_messages(tasks["prompt_text"], responses),
            "num_turns": responses.is_valid().cast(INT),
            "response_text": responses,
        }
        rows = self._with_ids(_of_tasks(rows, tasks["task_id"]))
        rows = _with_sizes(_completed(rows, texts))
        why_not = pc.if_else(responses.is_valid(), pa.scalar(None, TEXT), NO_ANSWER)
        self.untrainable.update(_untrainable(rows, why_not))
        return pa.table(tasks), rows

    def _tasks(self, rows: pa.Table, conversations: Sequence[_Conversation | None]) -> list[Task]:
        answer, workflow = values_of(rows, "answer"), values_of(rows, "workflow")
        taskset, split = values_of(rows, "taskset"), values_of(rows, "split")
        metadata = values_of(rows, "task_metadata")
        tasks = []
        for i, conversation in enumerate(conversations):
            if conversation is None:
                raise RowError(i, "an experience needs `task_id`, `prompt_text` or `messages`")
            tasks.append(
                Task(
                    messages=conversation.prompt,
                    answer=answer[i],
                    taskset=taskset[i] or self._defaults.taskset,
                    split=split[i] or self._defaults.split,
                    workflow=workflow[i],
                    metadata=json.loads(metadata[i]) if metadata[i] else None,
                )
            )
        return tasks

    def _of_stored_tasks(self, rows: pa.Table) -> list[_Conversation | None]:
        """Return each row's conversation; a row with only a response continues its stored task."""
        asks = [i for i, row in enumerate(values_of(rows, "messages")) if row is None]
        ids = values_of(rows, "task_id")
        for i, task_id in enumerate(ids):
            if task_id is None:
                raise RowError(i, "column `task_id` is NULL; each row must name its task")
        stored = look_up(self._store, "tasks", "task_id", {ids[i] for i in asks}, ["messages"])
        conversations = []
        for i, row in enumerate(_light(rows)):
            task = stored.get(ids[i])
            if row.get("messages") is None and row.get("prompt_text") is None and task is None:
                raise RowError(
                    i,
                    f"task {ids[i]!r} is not stored; import the tasks first, or give `prompt_text` "
                    "and leave `task_id` out",
                )
            asked = None if task is None else json.loads(task["messages"])
            conversations.append(_conversation(row, i, asked))
        return conversations

    def _with_ids(self, rows: pa.Table) -> pa.Table:
        """Fill in experience_id, group_id, rollout_index and source."""
        groups = pc.coalesce(column_of(rows, "group_id"), column_of(rows, "task_id"))
        # without `created_at`, so that a second import of the file gives the same ids
        contents = row_digests(rows.drop_columns({"created_at"} & set(rows.column_names)))
        times = self._contents.before(contents)
        # equal rows of a file are separate rollouts: later ones get a number
        again = pa.array(times + 1, mask=times == 0).cast(TEXT)
        made = joined("imported/", pa.array(contents, TEXT), pc.fill_null(joined("/", again), ""))
        ids = pc.coalesce(column_of(rows, "experience_id"), made)
        numbers = pa.array(self._rollouts.next(ids, groups))
        numbers = pc.coalesce(column_of(rows, "rollout_index", INT), numbers)
        rows = with_column(rows, "group_id", groups, TEXT)
        rows = with_column(rows, "rollout_index", numbers, INT)
        rows = with_column(rows, "experience_id", ids, TEXT)
        return with_column(rows, "source", filled(rows, "source", "imported"), TEXT)


def _light(rows: pa.Table) -> list[dict[str, Any]]:
    """Return the columns that a conversation is built from, as Python rows."""
    light = rows.select([n for n in rows.column_names if n in _READ])
    return light.to_pylist() if light.column_names else [{} for _ in range(rows.num_rows)]


_READ = ("messages", "num_asked", "prompt_text", "response_text")


def _conversation(
    row: dict[str, Any], place: int, asked: list[Message] | None = None
) -> _Conversation | None:
    """Split a row's conversation: the answer is the last assistant message, or `response_text`.

    Messages after that, such as tool results, belong to the answer. A format may specify how many
    messages are the prompt.
    """
    said = row.get("response_text")
    answer: list[Message] = [] if said is None else [{"role": "assistant", "content": said}]
    text = row.get("messages")
    if text is None:
        prompt = row.get("prompt_text")
        if asked is None and prompt is None:
            return None
        asked = asked or [{"role": "user", "content": prompt}]
        return _Conversation(asked, answer, dumps([*asked, *answer]), said)
    messages: list[Message] = json.loads(text)
    if row.get("num_asked") is not None:
        size = row["num_asked"]
        return _Conversation(messages[:size], messages[size:], text, last_answer(messages[size:]))
    if goes_on(messages, said):
        whole = listed([*elements(text), *map(dumps, answer)])
        return _Conversation(messages, answer, whole, said)
    if len(messages) == 1 and is_answer(messages[0]):
        raise RowError(place, "column `messages` holds an answer and no question")
    last = max((i for i, m in enumerate(messages) if is_answer(m)), default=0)
    asks = last or len(messages)  # the first message cannot be an answer
    return _Conversation(messages[:asks], messages[asks:], text, last_answer(messages))


def _of_tasks(rows: pa.Table, task_ids: Sequence[str | None] | pa.Array) -> pa.Table:
    """Return rows with the ids of their tasks, and without the columns of tasks."""
    own = TABLES["experiences"].names
    return with_column(
        rows.select([n for n in rows.column_names if n in own]), "task_id", task_ids, TEXT
    )


def _texts(conversations: Sequence[_Conversation | None]) -> dict[str, Sequence[object]]:
    """Return messages, prompt_text, response_text and num_turns of conversations."""
    given = [c or _Conversation([], [], "", None) for c in conversations]
    turns = [sum(m["role"] == "assistant" for m in c.messages) for c in given]
    return {
        "messages": [c.text if c else None for c in conversations],
        "prompt_text": [last_question(c.prompt) for c in given],
        "response_text": [c.said for c in given],
        "num_turns": [n if c else None for n, c in zip(turns, conversations, strict=True)],
    }


def _completed(rows: pa.Table, columns: Mapping[str, Sequence[object] | pa.Array]) -> pa.Table:
    """Fill in columns where they are NULL; messages are replaced, since an answer may be added."""
    for name, values in columns.items():
        made = values if isinstance(values, pa.Array) else pa.array(values, _KINDS[name])
        if name not in rows.column_names:
            rows = rows.append_column(name, made)
        elif rows.column(name).null_count or name == "messages":
            kept = made if name == "messages" else pc.coalesce(rows.column(name), made)
            rows = rows.set_column(rows.column_names.index(name), name, kept)
    return rows


_KINDS = {c.name: c.type for t in ("tasks", "experiences") for c in TABLES[t].columns}


def _untrainable(rows: pa.Table, why_not: pa.Array) -> dict[str, int]:
    """Count why rows cannot be trained on, judged by their tokens if any, else by their text."""
    has_tokens = column_of(rows, "token_ids", _KINDS["token_ids"]).is_valid()
    masks = pl.Series(values=column_of(rows, "loss_mask", _KINDS["loss_mask"]))
    trains = masks.list.any().fill_null(value=False).to_arrow()
    of_tokens = pc.if_else(trains, pa.scalar(None, TEXT), "its loss_mask trains no token")
    why = pc.if_else(has_tokens, of_tokens, why_not).drop_null()
    return {one["values"]: one["counts"] for one in why.value_counts().to_pylist()}


def _with_sizes(rows: pa.Table) -> pa.Table:
    """Fill in num_tokens when a file has tokens but not their number."""
    if "token_ids" not in rows.column_names or "num_tokens" in rows.column_names:
        return rows
    return rows.append_column(
        "num_tokens", pc.list_value_length(rows.column("token_ids")).cast(INT)
    )


def look_up(
    store: Store, table: str, key: str, wanted: set[str], columns: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Read the rows of a table that have the wanted ids, by id."""
    parts = rows_with(store.dataset(table), key, wanted, [key, *columns])
    return {row[key]: row for rows in parts for row in rows.to_pylist()}
