"""Logs of a travel agent who asks for what is missing, and what a policy would ask in its place."""

import json
from collections.abc import Iterator
from itertools import combinations

import polars as pl

from ....operators import question_tasks
from ....store import Experience, Task
from ....store.records import Message

_ASKED = {
    "city": ("Which city do you travel to?", "The city is {}."),
    "month": ("In which month do you travel?", "The month is {}."),
    "people": ("How many people travel?", "We are {} people."),
}
_CITIES, _MONTHS, _PEOPLE = ("Rome", "Oslo", "Lima"), ("May", "June", "July"), ("two", "three")


def talks() -> Iterator[Experience]:
    """Yield a logged conversation for each trip and the parts of it that are given at first.

    >>> [message["content"] for message in next(talks()).messages][:3]
    ['Hello. The city is Rome.', 'In which month do you travel?', 'The month is May.']
    """
    trips = [(c, m, p) for c in _CITIES for m in _MONTHS for p in _PEOPLE]
    for city, month, people in trips:
        known = {"city": city, "month": month, "people": people}
        for count in (1, 2):
            for given in combinations(known, count):
                opening = " ".join(
                    ["Hello.", *(_ASKED[part][1].format(known[part]) for part in given)]
                )
                log: list[Message] = [{"role": "user", "content": opening}]
                for part in known:
                    if part not in given:
                        question, answer = _ASKED[part]
                        log.append({"role": "assistant", "content": question})
                        log.append({"role": "user", "content": answer.format(known[part])})
                log.append({"role": "assistant", "content": "Thank you, that is all."})
                task = Task.ask(opening, taskset="talks")
                name = f"log-{task.task_id}"
                yield Experience(
                    task_id=task.task_id,
                    experience_id=name,
                    group_id=name,
                    messages=log,
                    source="imported",
                )


def talk_tasks(*, held_out: int = 40, taskset: str = "ask") -> Iterator[Task]:
    """Yield the tasks that `question_tasks` makes of `talks`; the first ones are for `eval`.

    >>> task = next(talk_tasks())
    >>> task.prompt_text, task.answer
    ('Hello. The city is Rome.', 'In which month do you travel?')
    """
    logs = [
        {
            "experience_id": row.experience_id,
            "task_id": row.task_id,
            "messages": json.dumps(row.messages),
        }
        for row in talks()
    ]
    texts = [pl.lit(None, pl.String).alias(name) for name in ("prompt_text", "response_text")]
    made = pl.DataFrame(logs).with_columns(texts).pipe(question_tasks(taskset=taskset))
    for i, row in enumerate(made.unique("task_id", maintain_order=True).iter_rows(named=True)):
        yield Task.from_row({**row, "split": "eval" if i < held_out else "train"})
