"""A language model plays the user: it knows who it is and what it wants, and says when it is done.

As in tau-bench (arXiv:2406.12045). The task's metadata has a `goal`, and a `persona` if it matters;
its messages are what the policy is told, up to the user's first message, or without one.
"""

from collections.abc import Sequence
from dataclasses import replace

from ...store.records import Experience, Message, Task
from ..inference.policy import Policy, PolicyError
from ..trajectories.conversation import Conversation

_ROLE = (
    "You play a user who talks to an assistant.\nWho you are: {persona}\nWhat you want: {goal}\n"
    "Write only the user's next message, short and in your own words. Do not give away at once all "
    "that you know, and do not help the assistant. When you have what you want, or it is clear "
    "that you will not get it, write {done}."
)
_BEGIN = "The assistant is listening. Write your first message."
_LONGEST = 8000
"""Characters of a user's message that are passed on."""


async def user_simulator(
    task: Task,
    policy: Policy,
    *,
    user: Policy,
    max_turns: int = 8,
    done: str = "[DONE]",
    role: str = _ROLE,
) -> list[Experience]:
    """Let the policy talk with `user`, a model of `explorer.auxiliary_models`, `max_turns` times
    at most.

    `role` is what the user is told, with `{persona}`, `{goal}` and `{done}`, the word that ends it.
    What the user says is told and not trained on. `metrics` of the last row have `user/done`: 1
    when the user ended it. Raises PolicyError when the user gives no answer.
    """
    talk = Conversation(task, policy)
    about = task.metadata or {}
    told = {"persona": str(about.get("persona") or "anybody"), "done": done}
    told["goal"] = str(about.get("goal") or task.prompt_text or "to be helped")
    for name, value in told.items():
        role = role.replace(f"{{{name}}}", value)
    given = len([m for m in task.messages if m.get("role") == "system"])
    is_done = False
    for _ in range(max_turns):
        if not talk.messages[given:] or talk.messages[-1].get("role") == "assistant":
            said = await _said(user, role, talk.messages[given:])
            is_done = done in said
            if is_done:
                break
            talk.add(said)
        try:
            await talk.respond()
        except PolicyError as error:
            if error.finish_reason != "context_overflow" or not talk.turns:
                raise
            talk.ended = error.finish_reason
            break
    rows = talk.rows()
    measured = {"user/done": float(is_done), "user/turns": float(len(talk.turns))}
    return [*rows[:-1], *(replace(r, metrics={**r.metrics, **measured}) for r in rows[-1:])]


async def _said(user: Policy, role: str, messages: Sequence[Message]) -> str:
    """Return what the user says next: in its own eyes, it is the assistant of the conversation."""
    other = {"user": "assistant", "assistant": "user"}
    seen: list[Message] = [
        {"role": other[str(m.get("role"))], "content": str(m.get("content") or "")}
        for m in messages
        if m.get("role") in other
    ]
    if not seen or seen[0]["role"] == "assistant":
        seen.insert(0, {"role": "user", "content": _BEGIN})
    [answer] = await user.generate([{"role": "system", "content": role}, *seen])
    return answer.text.strip()[:_LONGEST]
