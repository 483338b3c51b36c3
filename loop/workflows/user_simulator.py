"""A language model plays the user, with a persona and a goal, and ends the conversation.

As in tau-bench (arXiv:2406.12045). The task's metadata has a `goal` and optionally a `persona`. Its
messages are the policy's instructions, with or without the user's first message.
"""

from collections.abc import Sequence
from dataclasses import replace

from ...store.records import Experience, Message, Task
from ..inference.policy import Policy, PolicyError
from ..trajectories.conversation import Conversation

ROLE = (
    "You play a user who talks to an assistant.\nWho you are: {persona}\nWhat you want: {goal}\n"
    "Write only the user's next message, short and in your own words. Do not give away at once all "
    "that you know, and do not help the assistant. When you have what you want, or it is clear "
    "that you will not get it, write {done}."
)
_BEGIN = "The assistant is listening. Write your first message."
_LONGEST = 8000
"""Most characters of a user's message that are passed on."""


async def user_simulator(
    task: Task,
    policy: Policy,
    *,
    user: Policy,
    max_turns: int = 8,
    done: str = "[DONE]",
    role: str = ROLE,
) -> list[Experience]:
    """Let the policy and a simulated user converse for at most `max_turns` turns.

    `user` is a model of `explorer.auxiliary_models`. `role` is its system prompt, with `{persona}`,
    `{goal}` and `{done}`, the word that ends the conversation. The user's messages are not trained
    on. `metrics` of the last row have `user/done`: 1 if the user ended the conversation. Raises
    PolicyError if the user model fails.
    """
    conversation = Conversation(task, policy)
    plays = role_of(task, role, done)
    given = len([m for m in task.messages if m.get("role") == "system"])
    is_done = False
    for _ in range(max_turns):
        spoken = conversation.messages[given:]
        if not spoken or spoken[-1].get("role") == "assistant":
            text = await users_message(user, plays, spoken)
            is_done = done in text
            if is_done:
                break
            conversation.add(text)
        try:
            await conversation.respond()
        except PolicyError as error:
            if error.finish_reason != "context_overflow" or not conversation.turns:
                raise
            conversation.ended = error.finish_reason
            break
    rows = conversation.rows()
    measured = {"user/done": float(is_done), "user/turns": float(len(conversation.turns))}
    return [*rows[:-1], *(replace(r, metrics={**r.metrics, **measured}) for r in rows[-1:])]


def role_of(task: Task, role: str, done: str) -> str:
    """Fill in a role, the system prompt of the user model, for the user of a task."""
    about = task.metadata or {}
    fields = {"persona": str(about.get("persona") or "anybody"), "done": done}
    fields["goal"] = str(about.get("goal") or task.prompt_text or "to be helped")
    for name, value in fields.items():  # not `str.format`: a role may contain other braces
        role = role.replace(f"{{{name}}}", value)
    return role


async def users_message(user: Policy, role: str, messages: Sequence[Message]) -> str:
    """Return the user's next message; roles are swapped, since the model answers as assistant.

    It does not see calls of tools, their results, or messages without text.
    """
    other = {"user": "assistant", "assistant": "user"}
    seen: list[Message] = [
        {"role": other[str(m.get("role"))], "content": str(m.get("content") or "")}
        for m in messages
        if m.get("role") in other and not (m.get("tool_calls") and not m.get("content"))
    ]
    if not seen or seen[0]["role"] == "assistant":
        seen.insert(0, {"role": "user", "content": _BEGIN})
    [answer] = await user.generate([{"role": "system", "content": role}, *seen])
    return answer.text.strip()[:_LONGEST]
