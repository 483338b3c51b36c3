"""Learn-to-Ask (arXiv:2510.25441): ask what an expert would still find out, or stop.

The tasks are made of logs of experts by `question_tasks`; no user has to be simulated.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from ...operators.question_tasks import STOP
from ...store.errors import JobError
from ...store.records import Message, Task
from ..inference.policy import Policy
from ..trajectories.conversation import Conversation
from ..trajectories.trajectory import record_metric

_SYSTEM = (
    "Find out what you need to know before you decide. Ask one short question that the user can "
    "answer, about what you do not know yet. When nothing more is to be found out, write {stop} "
    "and nothing else."
)
_JUDGED = (
    "An expert talked with a user. This was asked and answered later on:\n{information}\n\n"
    "Somebody else asks at this point:\n{said}\n\n"
    "Line 1: `content: 1` if the question would bring out a part of what was answered later, "
    "`content: 0.5` if it comes near it, `content: 0` if not.\n"
    "Line 2: `format: 1` if it is one short question that a user can answer, else `format: 0`."
)
_SCORE = re.compile(
    r"\b(content|format)[^\w\-.]+(0(?:\.50*|\.0+)?|1(?:\.0+)?)(?!\w|[.,/]\d)", re.IGNORECASE
)
_WORD = re.compile(r"\w{4,}")


async def learn_to_ask(
    task: Task,
    policy: Policy,
    *,
    judge: Policy | None = None,
    fusion: Literal["product", "sum"] = "product",
    stop: str = STOP,
    system: str = _SYSTEM,
) -> dict[str, float | None]:
    """Let the policy ask its next question, or stop, and reward both decision and question.

    With d for the right decision (0 or 1), c for the content of the question (0, 0.5 or 1) and f
    for its form, the reward is d (1 + 2 c) + f, or with `fusion: sum` d + c + f, and 0 after a
    wrong decision, as in the authors' code. A stop in time has c = 1, and f = 1 if it is all that
    is said. `judge`, a model of `explorer.auxiliary_models`, gives c and f by what was answered
    later in the log; the reward is NULL if its verdict cannot be read. Without one, c is 1 if the
    question has a word of four letters in common with that, and f is 1 for one question mark, at
    the end.
    `system` is the system message of conversations that have none. The metrics are `ask/decision`,
    `ask/content` and `ask/format`. Raises JobError for a task that has no `ask` in its metadata.
    """
    about = (task.metadata or {}).get("ask")
    if not isinstance(about, Mapping) or about.get("decision") not in ("stop", "continue"):
        raise JobError(
            f"task {task.task_id} has no `ask` with a `decision` in its metadata; the operator "
            "`question_tasks` makes such tasks"
        )
    has_system = any(message.get("role") == "system" for message in task.messages)
    instructions: Message = {"role": "system", "content": system.replace("{stop}", stop)}
    messages = [*([] if has_system else [instructions]), *task.messages]
    said = (await Conversation(task, policy, messages=messages).respond()).text.strip()
    # anywhere in the reply: `Goodbye. <stop />` has decided to stop, and loses its form alone
    decision = "stop" if stop in said else "continue"
    if decision != about["decision"]:
        scores: tuple[float, float, float] | None = (0.0, 0.0, 0.0)
    elif decision == "stop":
        scores = (1.0, 1.0, float(said == stop))
    else:
        scores = await _of_question(judge, said, about)
    if scores is None:
        return {"ask": None}
    right, content, form = scores
    for name, value in zip(("decision", "content", "format"), scores, strict=True):
        record_metric(policy, f"ask/{name}", value)
    both = right * (1 + 2 * content) if fusion == "product" else right + content
    return {"ask": both + form}


async def _of_question(
    judge: Policy | None, said: str, about: Mapping[str, Any]
) -> tuple[float, float, float] | None:
    information = str(about.get("information") or "")
    if judge is None:
        words = (set(_WORD.findall(text.lower())) for text in (said, information))
        is_one = said.endswith("?") and said.count("?") == 1
        return 1.0, float(bool(set.intersection(*words))), float(is_one)
    asked = _JUDGED.replace("{information}", information).replace("{said}", said)
    [verdict] = await judge.generate([{"role": "user", "content": asked}])
    # the last of each counts: a judge may repeat the instructions first
    found = {name.lower(): float(score) for name, score in _SCORE.findall(verdict.text)}
    return (1.0, found["content"], found["format"]) if len(found) == 2 else None
