"""A conversation with a policy, recorded turn by turn for training."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...store.records import Experience, Message, Task
from ..inference.messages import after, is_begun
from ..inference.policy import Completion, Policy, PolicyError, Sampling, Turn
from .trajectory import RolloutPolicy, to_experiences


class Conversation:
    """A conversation of several turns about a task, for workflows.

    >>> import asyncio
    >>> from rlake.loop.inference.scripted import ScriptedPolicy
    >>> conversation = Conversation(Task.ask("2+2="), ScriptedPolicy(["5", "4"]))
    >>> async def ask_again():
    ...     await conversation.respond()
    ...     conversation.add("No. Again:")
    ...     return await conversation.respond()
    >>> asyncio.run(ask_again()).text
    '4'
    >>> [row] = conversation.rows(reward=1.0)
    >>> row.num_turns, row.response_text, sum(row.loss_mask)
    (2, '4', 4)
    """

    def __init__(
        self,
        task: Task,
        policy: Policy,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        messages: Sequence[Message] | None = None,
    ) -> None:
        """Begin with `messages`; None: the task's."""
        self.task, self._policy, self.tools = task, policy, tools
        self.messages: list[Message] = list(task.messages if messages is None else messages)
        self.turns: list[Turn] = []
        self.ended: str | None = None
        """Why it ended, if not for the last completion's reason: one of FINISH_REASONS."""

    async def respond(
        self, *, sampling: Sampling | None = None, prefix: str | None = None
    ) -> Completion:
        """Let the policy answer, and keep the answer as a message.

        `prefix` is the beginning of the answer, which the policy continues; it is not trained on.
        If the last message is already an answer, the policy continues it.
        """
        if prefix:
            before = self.messages.pop()["content"] if is_begun(self.messages) else ""
            self.messages.append({"role": "assistant", "content": f"{before}{prefix}"})
        asked = list(self.messages)  # a copy: the turn must not change with the conversation
        [completion] = await self._policy.generate(
            asked, tools=self.tools, sampling=sampling, earlier=self.turns
        )
        turn = Turn(messages=asked, completion=completion, tools=self.tools)
        self.turns.append(turn)
        self.messages = after(turn)
        return completion

    async def try_respond(
        self, *, sampling: Sampling | None = None, prefix: str | None = None
    ) -> bool:
        """Let the policy answer; return False if the conversation ended instead.

        A conversation that is too long for the model ends, and so does a cancelled one; the turns
        so far are kept. Raises PolicyError for any other error, and if the first turn fails.
        """
        try:
            completion = await self.respond(sampling=sampling, prefix=prefix)
        except PolicyError as error:
            if not self.turns or error.finish_reason not in ("context_overflow", "abort"):
                raise
            self.finish(error.finish_reason)
            return False
        return completion.finish_reason != "abort"

    def finish(self, reason: str) -> None:
        """Set why the conversation ends: the `finish_reason` of its last row."""
        self.ended = reason
        # The rollout too: a workflow that returns no rows has them built from the policy's turns.
        if isinstance(self._policy, RolloutPolicy):
            self._policy.ended = reason

    def add(self, content: str, *, role: str = "user", **rest: Any) -> None:
        """Add a message; one of role `tool` needs its `tool_call_id`."""
        self.messages.append({"role": role, "content": content, **rest})

    def rows(self, *, reward: float | None = None, **columns: Any) -> list[Experience]:
        """Return the turns so far as rows; if there are several, each has the reward."""
        made = to_experiences(self.task, self.turns)
        if self.ended and made:
            made[-1] = replace(made[-1], finish_reason=self.ended)
        return [replace(row, reward=reward, **columns) for row in made]
