"""Fill in what a SELECT omits: ids, messages, groups, and the tasks of experiences."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..conversation import goes_on, is_answer, last_answer, last_question, why_untrainable
from ..ids import row_digests
from ..key_index import rows_with
from ..records import Message, Task
from ..schema import TABLES, Column
from ..store import Store
from .raw_json import dumps, elements, listed
from .select_columns import JSON_COLUMNS, RowError, values_of, with_column
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
    made = [_filled(row, i, defaults) for i, row in enumerate(rows.to_pylist())]
    kinds = {c.name: c.type for c in TABLES["tasks"].columns}
    if "created_at" not in rows.column_names:
        del kinds["created_at"]
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

    def with_tasks(self, rows: pa.Table) -> tuple[list[Task], pa.Table]:
        """Return the tasks of rows without `task_id`, and the completed rows."""
        tasks: list[Task] = []
        if "task_id" in rows.column_names:
            conversations = self._of_stored_tasks(rows)
        else:
            conversations = [_conversation(row, i) for i, row in enumerate(_light(rows))]
            tasks = self._tasks(rows, conversations)
            rows = with_column(rows, "task_id", (t.task_id for t in tasks), TEXT)
            own = TABLES["experiences"].names
            rows = rows.select([n for n in rows.column_names if n in own])
        rows = _with_sizes(_with_texts(self._with_ids(rows), conversations))
        self.untrainable.update(_untrainable(rows, conversations))
        if self._tokenization is not None:
            rows = self._tokenization.fill(rows, [t.messages if t else [] for t in conversations])
        return tasks, rows

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
        tasks, groups = values_of(rows, "task_id"), values_of(rows, "group_id")
        groups = [g if g is not None else t for g, t in zip(groups, tasks, strict=True)]
        rollouts, ids = values_of(rows, "rollout_index"), values_of(rows, "experience_id")
        # without `created_at`, so that a second import of the file gives the same ids
        contents = row_digests(rows.drop_columns({"created_at"} & set(rows.column_names)))
        times = self._contents.before(contents)
        for i, content in enumerate(contents):
            if ids[i] is None:
                # equal rows of a file are separate rollouts: later ones get a number
                ids[i] = f"imported/{content}" + (f"/{times[i] + 1}" if times[i] else "")
        rollouts = self._rollouts.fill(ids, groups, rollouts)
        rows = with_column(rows, "group_id", groups, TEXT)
        rows = with_column(rows, "rollout_index", rollouts, INT)
        rows = with_column(rows, "experience_id", ids, TEXT)
        return with_column(
            rows, "source", (s or "imported" for s in values_of(rows, "source")), TEXT
        )


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


def _with_texts(rows: pa.Table, conversations: Sequence[_Conversation | None]) -> pa.Table:
    """Fill in messages, prompt_text, response_text and num_turns."""
    whole: list[str | None] = []
    prompts, responses = values_of(rows, "prompt_text"), values_of(rows, "response_text")
    turns = values_of(rows, "num_turns")
    for i, conversation in enumerate(conversations):
        whole.append(conversation.text if conversation else None)
        if conversation is None:
            continue
        if prompts[i] is None:
            prompts[i] = last_question(conversation.prompt)
        if responses[i] is None:
            responses[i] = conversation.said
        if turns[i] is None:
            turns[i] = sum(m["role"] == "assistant" for m in conversation.messages)
    rows = with_column(rows, "messages", whole, TEXT)
    rows = with_column(rows, "prompt_text", prompts, TEXT)
    rows = with_column(rows, "response_text", responses, TEXT)
    return with_column(rows, "num_turns", turns, INT)


def _untrainable(rows: pa.Table, conversations: Sequence[_Conversation | None]) -> Iterator[str]:
    """Yield why a row cannot be trained on, judged by its tokens if any, else by its text."""
    has_tokens = [False] * rows.num_rows
    if "token_ids" in rows.column_names:
        has_tokens = rows.column("token_ids").is_valid().to_pylist()
    masks = rows.column("loss_mask") if "loss_mask" in rows.column_names else None
    for i, conversation in enumerate(conversations):
        if has_tokens[i]:
            if masks is None or not any(masks[i].as_py() or ()):
                yield "its loss_mask trains no token"
        elif (why := why_untrainable(conversation.messages if conversation else ())) is not None:
            yield why


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
