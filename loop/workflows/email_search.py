"""E-mail search: the policy finds and reads mails with tools until it can answer a question.

The task is that of ART-E (openpipe.ai/blog/art-e-mail-agent): an inbox, a question, an answer, and
the mails that have it.
"""

import json
from collections.abc import Mapping
from datetime import date
from functools import cache
from typing import Any

from ...store.errors import JobError
from ...store.records import Task
from ..environments.text_index import TableSpec, TextIndex, table_rows
from ..inference.policy import Policy
from ..trajectories.trajectory import record_metric
from .react import answered_with_tools

_COLUMNS = ("mail_id", "sent_on", "sender", "recipients", "subject", "body")
_QUESTION = (
    "Question about an inbox: {question}\nRight answer: {right}\nAnswer to judge: {said}\n"
    "Does it give the right answer, whatever else it says? Reply with yes or no."
)


async def email_search(
    task: Task,
    policy: Policy,
    *,
    mails: TableSpec,
    judge: Policy | None = None,
    max_turns: int = 10,
    most_found: int = 10,
) -> dict[str, float | None] | None:
    """Let the policy call `search_mails` and `read_mail` until it answers without a call.

    `mails` is a file or a function with the columns mail_id, sent_on (YYYY-MM-DD), sender,
    recipients (a list), subject and body. The task's question has an answer; its metadata may have
    `mail`: `{inbox: address}`, which hides the mails of others, and `sources`, the mails with the
    answer: the metric `mails/found` is the share of them that was read. With `judge`, a model of
    `explorer.auxiliary_models`, the reward is 1 if it takes the answer for right and 0 if not or if
    there is none; else the configured rewards judge the answer.
    """
    about = (task.metadata or {}).get("mail") or {}
    inbox = _Inbox(_indexed(json.dumps(mails, sort_keys=True)), about.get("inbox"), most_found)
    tools = [inbox.search_mails, inbox.read_mail]
    answer = await answered_with_tools(task, policy, tools, max_turns=max_turns)
    sources = {str(source) for source in about.get("sources") or ()}
    if sources:
        record_metric(policy, "mails/found", len(sources & inbox.was_read) / len(sources))
    if judge is None:
        return None
    return {"answer": 0.0 if answer is None else await _judged(judge, task, answer)}


class _Inbox:
    """The mails that one address sent or got; what was read is remembered."""

    def __init__(self, index: TextIndex, address: str | None, most_found: int) -> None:
        self._index, self._address, self._most_found = index, address, most_found
        self.was_read: set[str] = set()

    def search_mails(
        self, words: str, sent_after: date | None = None, sent_before: date | None = None
    ) -> str:
        """Find mails by words of their subject, text, sender and recipients, the best first.

        Args:
            words: what to search for
            sent_after: only mails of this day or later, as YYYY-MM-DD
            sent_before: only mails of this day or earlier, as YYYY-MM-DD
        """
        first, last = str(sent_after or ""), str(sent_before or "9999")
        ranked = self._index.search(words, most=len(self._index.rows))
        found = [m for m in ranked if self._is_mine(m) and first <= str(m["sent_on"])[:10] <= last]
        if not found:
            return "no mail was found"
        return "\n".join(
            f"{m['mail_id']}: {m['sent_on']}, {m['sender']}, {m['subject']}"
            for m in found[: self._most_found]
        )

    def read_mail(self, mail_id: str) -> str:
        """Read a mail.

        Args:
            mail_id: the id that `search_mails` gave
        """
        mail = self._index.rows.get(mail_id)
        if mail is None or not self._is_mine(mail):
            raise JobError(f"no mail has the ID `{mail_id}`; `search_mails` lists ids")
        self.was_read.add(mail_id)
        heads = {
            "from": mail["sender"],
            "to": ", ".join(mail["recipients"]),
            "date": mail["sent_on"],
        }
        lines = [
            f"{name}: {value}" for name, value in {**heads, "subject": mail["subject"]}.items()
        ]
        return "\n".join([*lines, "", str(mail["body"])])

    def _is_mine(self, mail: Mapping[str, Any]) -> bool:
        return self._address is None or self._address in (mail["sender"], *mail["recipients"])


async def _judged(judge: Policy, task: Task, answer: str) -> float | None:
    asked = _QUESTION.format(question=task.prompt_text, right=task.answer, said=answer)
    [verdict] = await judge.generate([{"role": "user", "content": asked}])
    said = verdict.text.strip().lower()
    # an unreadable verdict is none, rather than a wrong answer
    return {"yes": 1.0, "no": 0.0}.get(said[: 3 if said.startswith("yes") else 2])


@cache
def _indexed(mails: str) -> TextIndex:
    rows = table_rows(json.loads(mails), needs=_COLUMNS)
    texts = ("subject", "body", "sender")
    searched = [
        {**row, "_text": " ".join([*(str(row[t]) for t in texts), *row["recipients"]])}
        for row in rows
    ]
    return TextIndex(searched, key="mail_id", text="_text")
