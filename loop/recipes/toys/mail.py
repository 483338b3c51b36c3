"""An inbox of a small office, and questions that one mail answers."""

from collections.abc import Iterator
from datetime import date, timedelta
from typing import Any

import numpy as np

from ....store import Task

ME = "ada@example.com"
_PEOPLE = ("ben", "chloe", "dan", "emma", "finn", "grace")
_TOPICS = ("budget", "hiring", "launch", "logo", "office", "payroll", "press", "safety", "website")
_EVENTS = ("meeting", "workshop", "call", "lunch")
_BEGIN = date(2025, 1, 6)


def mails(*, count: int = 100, seed: int = 0) -> list[dict[str, Any]]:
    """Return mails that each tell the room and the hour of an event; every tenth is to others.

    >>> print(mails(count=1, seed=0)[0]["body"])
    Dear all, the hiring meeting is in room 29 at 16:00.
    """
    rng = np.random.default_rng(seed)
    events = [(topic, event) for topic in _TOPICS for event in _EVENTS]
    order = rng.permutation(len(events))
    made = []
    for i in range(count):
        topic, event = events[order[i % len(events)]]
        sent = _BEGIN + timedelta(days=i)
        sender, other = rng.choice(_PEOPLE, 2, replace=False)
        room, hour = int(rng.integers(1, 30)), int(rng.integers(8, 18))
        made.append(
            {
                "mail_id": f"m{i:03d}",
                "sent_on": sent.isoformat(),
                "sender": f"{sender}@example.com",
                "recipients": [f"{other}@example.com" if i % 10 == 9 else ME],
                "subject": f"{topic} {event}",
                "body": f"Dear all, the {topic} {event} is in room {room} at {hour}:00.",
                "room": str(room),
                "topic": topic,
                "event": event,
            }
        )
    return made


def mail_questions(
    *, count: int = 100, held_out: int = 20, seed: int = 0, taskset: str = "mail"
) -> Iterator[Task]:
    """Yield a question about each mail of `mails` to one inbox, for the workflow `email_search`.

    The events of a topic recur, so that the month is part of the question. `held_out` random ones
    have the split `eval`.

    >>> task = next(mail_questions(held_out=0))
    >>> task.prompt_text, task.answer
    ('In which room is the hiring meeting that was announced in January 2025?', '29')
    """
    mine = [mail for mail in mails(count=count, seed=seed) if ME in mail["recipients"]]
    held = set(np.random.default_rng(seed).permutation(len(mine))[:held_out].tolist())
    for i, mail in enumerate(mine):
        month = date.fromisoformat(mail["sent_on"]).strftime("%B %Y")
        about = f"{mail['topic']} {mail['event']} that was announced in {month}"
        yield Task.ask(
            f"In which room is the {about}?",
            mail["room"],
            taskset=taskset,
            split="eval" if i in held else "train",
            metadata={"mail": {"inbox": ME, "sources": [mail["mail_id"]]}},
        )
