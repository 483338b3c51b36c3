"""New tasks proposed by a model; complete ones that differ from the stored tasks are kept."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...operators.chat_client import Ask
from ...operators.concurrency import answers
from ...operators.embed import hashed_ngrams
from ...store import Store, Task
from ...store.errors import ConfigError
from ...store.ids import lineage_id as new_lineage_id
from ...store.lineage.pipeline_runs import pipeline_run
from ...store.query import literal
from ...store.records import Message, proper

INSTRUCTION = (
    "Write new tasks like the examples: as hard or slightly harder, each about something else, and "
    "each with one answer that can be checked. Reply with {per_request} lines, each one JSON "
    'object: {"question": "...", "answer": "..."}'
)
# A model that thinks aloud drafts tasks there, which it may then reject.
_THOUGHT = re.compile(r"^.*</think>", re.DOTALL)
_SHOWN = 4
"""Stored tasks that each request shows as examples."""
_ROWS = 1024
"""Vectors compared in one batch."""
_LONGEST = 20_000
"""Most characters of a question."""


@dataclass
class Proposed:
    """The result of `propose`."""

    taskset: str
    stored: int = 0
    """New tasks stored by this call."""
    already: int = 0
    """Tasks of the taskset that were stored before."""
    requests: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Number of rejected proposals by reason."""
    failure: str | None = None
    """Error of the last request that failed."""


def propose(
    store: Store,
    ask: Ask,
    *,
    taskset: str,
    number: int,
    by: str = "",
    examples: str = "split = 'train'",
    instruction: str = INSTRUCTION,
    per_request: int = 5,
    attempts: int | None = None,
    max_concurrency: int = 4,
    timeout: float = 60.0,
    alike: float = 0.9,
    seed: int = 0,
    listener: Callable[[Proposed], None] | None = None,
) -> Proposed:
    """Request tasks from a model until the taskset has `number`, in at most `attempts` requests.

    Each request shows a few stored tasks that match the SQL condition `examples`, chosen by `seed`.
    A proposal is kept if it has a question and an answer, and if no stored or kept question has the
    same letters or a cosine similarity of character n-grams above `alike`. Others become rows of
    `drops` with the reason. Tasks are stored after each round of `max_concurrency` requests, so
    that the same call continues after a kill. `attempts` is by default three times the number of
    requests that would suffice if all proposals were kept.

    Raises ConfigError if no task matches `examples`.
    """
    shown = _examples(store, examples)
    known = _Known(store, alike)
    done = Proposed(taskset, already=_stored(store, taskset))
    most = attempts or 3 * -(-number // per_request)
    lineage_id = new_lineage_id()
    refused: set[str] = set()  # a task that is proposed again has one row in `drops`
    requests = _requests(shown, instruction.replace("{per_request}", str(per_request)), seed)
    while done.already + done.stored < number and done.requests < most:
        asked = [next(requests) for _ in range(min(max_concurrency, most - done.requests))]
        replies = answers(ask, asked, max_concurrency=max_concurrency, timeout=timeout)
        done.requests += len(asked)
        kept: list[Task] = []
        drops: dict[str, dict[str, str]] = {}
        for text, error in replies:
            for task, why in _read(text, error, taskset, by):
                full = done.already + done.stored + len(kept) >= number
                why = why or ("there are enough" if full else known.refusal(task))
                if why is None and task is not None:
                    kept.append(task)
                else:
                    done.refused[(why or "").partition(":")[0]] += 1
                    done.failure = (why or "") if text is None else done.failure
                    drop = _drop(lineage_id, task, why or "", sum(done.refused.values()))
                    drops[drop["task_id"]] = drop
        store.append("drops", [drop for name, drop in drops.items() if name not in refused])
        refused |= set(drops)
        done.stored += store.append("tasks", kept).rows
        if listener is not None:
            listener(done)
    # last: a killed call leaves its tasks, which the next call counts as stored
    store.append("lineage", [_lineage(lineage_id, by, examples, done)])
    return done


class _Known:
    """The stored questions: a proposal must differ from them."""

    def __init__(self, store: Store, alike: float) -> None:
        rows = store.sql("SELECT prompt_text FROM tasks WHERE prompt_text IS NOT NULL").fetchall()
        self._texts = [text for (text,) in rows]
        self._same = {_letters(text): text for text in self._texts}
        starts = range(0, len(rows), _ROWS)
        self._vectors = [hashed_ngrams(self._texts[i : i + _ROWS]) for i in starts]
        self._alike = alike

    def refusal(self, task: Task | None) -> str | None:
        """Return why a task is not new; if it is new, add it and return None."""
        text = (task.prompt_text if task else None) or ""
        if _letters(text) in self._same:
            return f"it is there already: {self._same[_letters(text)][:200]}"
        vector = hashed_ngrams([text])
        for i, part in enumerate(self._vectors):
            likeness = part @ vector[0]
            place = int(likeness.argmax()) if len(likeness) else 0
            if len(likeness) and likeness[place] > self._alike:
                other = self._texts[i * _ROWS + place]
                return f"it is like another: {likeness[place]:.2f} to {other[:200]}"
        self._same[_letters(text)] = text
        self._texts.append(text)
        if self._vectors and len(self._vectors[-1]) < _ROWS:
            self._vectors[-1] = np.concatenate([self._vectors[-1], vector])
        else:
            self._vectors.append(vector)
        return None


def _letters(text: str) -> str:
    return "".join(text.casefold().split())


def _examples(store: Store, condition: str) -> list[Task]:
    rows = store.sql(
        f"SELECT * FROM tasks WHERE ({condition}\n) AND prompt_text IS NOT NULL AND answer IS NOT "
        "NULL ORDER BY task_id"
    )
    found = [Task.from_row(row) for row in rows.pl().iter_rows(named=True)]
    if not found:
        raise ConfigError(
            f"no task with a prompt and an answer matches `{condition}`, and a model needs "
            "examples; import some with `rlake import tasks`"
        )
    return found


def _stored(store: Store, taskset: str) -> int:
    return store.dataset("tasks").count_rows(filter=f"taskset = {literal(taskset)}")


def _requests(shown: Sequence[Task], instruction: str, seed: int) -> Iterator[list[Message]]:
    number = 0
    while True:
        number += 1
        rng = np.random.default_rng([seed, number])
        places = rng.choice(len(shown), min(_SHOWN, len(shown)), replace=False)
        lines = [
            json.dumps(
                {"question": shown[i].prompt_text, "answer": shown[i].answer}, ensure_ascii=False
            )
            for i in places
        ]
        yield [{"role": "user", "content": "\n".join([instruction, "Examples:", *lines])}]


def _read(
    text: str | None, error: str | None, taskset: str, by: str
) -> Iterator[tuple[Task | None, str | None]]:
    """Yield each proposal of a reply as a task, or the reason why it is not one."""
    if text is None:
        yield None, f"the request failed: {error or 'it gave nothing'}"
        return
    objects = list(_objects(text))
    if not objects:
        yield None, f"no JSON object in the reply: {text[:200]}"
    for one in objects:
        question, answer = one.get("question"), one.get("answer")
        if not isinstance(question, str) or not question.strip():
            yield None, f"no question: {json.dumps(one)[:200]}"
        elif len(question) > _LONGEST:
            yield None, f"a question of {len(question)} characters: {question[:200]}"
        elif isinstance(answer, bool | list | dict) or answer is None or not str(answer).strip():
            yield None, f"no answer: {question[:200]}"
        else:
            made = {"proposed_by": by} if by else None
            asked, known = proper(question.strip()), proper(str(answer).strip())
            yield Task.ask(asked, known, taskset=taskset, metadata=made), None


def _objects(text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON objects that a text holds, in a list, one a line, or between words."""
    text = _THOUGHT.sub("", proper(text))
    decoder, place = json.JSONDecoder(), 0
    while (place := text.find("{", place)) >= 0:
        try:
            found, place = decoder.raw_decode(text, place)
        except (json.JSONDecodeError, RecursionError):
            place += 1
            continue
        if isinstance(found, dict):
            yield found


def _drop(lineage_id: str, task: Task | None, why: str, number: int) -> dict[str, str]:
    return {
        "lineage_id": lineage_id,
        "task_id": task.task_id if task is not None else f"{lineage_id}/{number}",
        "operator": "propose",
        "reason": proper(why),
    }


def _lineage(lineage_id: str, by: str, examples: str, done: Proposed) -> dict[str, Any]:
    refused = sum(done.refused.values())
    return pipeline_run(
        lineage_id,
        pipeline=f"tasks proposed by {by}" if by else "tasks proposed",
        source=f"table tasks where {examples}",
        sink="table tasks",
        rows_in=done.stored + refused,
        rows_out=done.stored,
        rows_dropped=refused,
    )
