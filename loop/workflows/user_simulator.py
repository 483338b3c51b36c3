"""A language model plays the user, with a persona and a goal, and ends the conversation.

As in tau-bench (arXiv:2406.12045). The task's metadata has a `goal` and optionally a `persona`. Its
messages are the policy's instructions, with or without the user's first message.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...store.records import Experience, Message, Task
from ..environments.tools import Tool, Toolbox
from ..inference.policy import Policy, PolicyError
from ..trajectories.conversation import Conversation
from ..trajectories.trajectory import RolloutPolicy
from .react import results

ROLE = (
    "You play a user who talks to an assistant.\nWho you are: {persona}\nWhat you want: {goal}\n"
    "Write only the user's next message, short and in your own words. Do not give away at once all "
    "that you know, and do not help the assistant. When you have what you want, or it is clear "
    "that you will not get it, write {done}."
)
_BEGIN = "The assistant is listening. Write your first message."
_LONGEST = 8000
"""Most characters of a user's message that are passed on."""
_ROUNDS = 8
"""Answers with calls of tools, after which users must say something."""


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
    person = SimulatedUser(task, user_of(policy, user), role=role, done=done)
    given = len([m for m in task.messages if m.get("role") == "system"])
    for _ in range(max_turns):
        spoken = conversation.messages[given:]
        if not spoken or spoken[-1].get("role") == "assistant":
            text = await person.reply(spoken)
            if person.is_done:
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
    measured = {"user/done": float(person.is_done), "user/turns": float(len(conversation.turns))}
    return [*rows[:-1], *(replace(r, metrics={**r.metrics, **measured}) for r in rows[-1:])]


def user_of(policy: Policy, user: Policy) -> Policy:
    """Return the user of the policy's rollout, seeded by it: the rollout can be made again."""
    return policy.companion(user, "user") if isinstance(policy, RolloutPolicy) else user


class SimulatedUser:
    """The user of one conversation, played by a model, perhaps with tools of their own."""

    def __init__(
        self,
        task: Task,
        user: Policy,
        *,
        role: str,
        done: str,
        tools: Sequence[Tool] = (),
        seconds: float = 30.0,
        note: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Play the `role`, in which `{persona}`, `{goal}` and `{done}` are filled in for a task.

        Calls of the `tools`, and their results, are for the user alone, and counted as `user/...`.
        """
        system: Message = {"role": "system", "content": _filled_in(role, task, done)}
        self._box = Toolbox(
            tools, seconds=seconds, note=lambda name: note(name.replace("tools/", "user/"))
        )
        self._own = Conversation(task, user, tools=self._box.specs or None, messages=[system])
        self._done, self._num_heard = done, 0
        self.is_done = False
        """Whether the last reply ended the conversation."""

    async def reply(self, messages: Sequence[Message]) -> str:
        """Return the user's next message, which the caller adds to the conversation's `messages`.

        The user does not see calls of tools, their results, or messages without text. Raises
        PolicyError if the model fails.
        """
        own = self._own.messages
        own += _seen_by_user(messages[self._num_heard :])
        if len(own) == 1 or own[1].get("role") == "assistant":
            own.insert(1, {"role": "user", "content": _BEGIN})
        self._num_heard = len(messages) + 1  # with the reply
        try:
            text = await self._spoken()
        except PolicyError as error:
            # not that of the policy: its row did not overflow because the user's context did
            reason = "abort" if error.finish_reason == "abort" else "engine_error"
            raise PolicyError(f"the simulated user: {error}", finish_reason=reason) from error
        # the word may stand in a sentence that says goodbye
        self.is_done = self._done in text
        return text

    async def _spoken(self) -> str:
        for _ in range(_ROUNDS):
            answer = (await self._own.respond()).answer
            if not (calls := answer.get("tool_calls")):
                return str(answer.get("content") or "").strip()[:_LONGEST]
            self._own.messages += [called.message async for called in results(self._box, calls)]
        raise PolicyError(f"called tools {_ROUNDS} times in a row without a message")


def _filled_in(role: str, task: Task, done: str) -> str:
    about = task.metadata or {}
    fields = {"persona": str(about.get("persona") or "anybody"), "done": done}
    fields["goal"] = str(about.get("goal") or task.prompt_text or "to be helped")
    for name, value in fields.items():  # not `str.format`: a role may contain other braces
        role = role.replace(f"{{{name}}}", value)
    return role


def _seen_by_user(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with text, with roles swapped: the model answers as assistant."""
    other = {"user": "assistant", "assistant": "user"}
    return [
        {"role": other[str(m.get("role"))], "content": str(m.get("content") or "")}
        for m in messages
        if m.get("role") in other and not (m.get("tool_calls") and not m.get("content"))
    ]
