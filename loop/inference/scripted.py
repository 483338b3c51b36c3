"""A policy that answers from a script, for tests of what surrounds a policy."""

from collections.abc import Callable, Sequence
from itertools import cycle

from ...store.records import Message
from .policy import Completion, Sampling, Segment, Tools, Turn


class ScriptedPolicy:
    """Answers from a function or a list, with made-up tokens: one for each character.

    >>> import asyncio
    >>> policy = ScriptedPolicy(lambda messages, i: "4" if i == 0 else "5")
    >>> [c.text for c in asyncio.run(policy.generate([{"role": "user", "content": "2+2="}], n=2))]
    ['4', '5']
    """

    def __init__(
        self, answers: Callable[[Sequence[Message], int], str] | Sequence[str], *, version: int = 0
    ) -> None:
        self._answers = answers if callable(answers) else cycle(answers)
        self.version = version

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        tools: Tools = None,
        sampling: Sampling | None = None,
        earlier: Sequence[Turn] = (),
    ) -> list[Completion]:
        """Return the scripted answers; tool calls are read from their text."""
        return [self._complete(messages, i, tools, sampling) for i in range(n)]

    def _complete(
        self, messages: Sequence[Message], i: int, tools: Tools, sampling: Sampling | None
    ) -> Completion:
        from ..models.tool_calls import assistant_message

        answers = self._answers
        text = answers(messages, i) if callable(answers) else next(answers)
        tokens = [ord(c) for c in text] + [0]
        return Completion(
            text=text,
            finish_reason="stop",
            message=assistant_message(text, tools),
            prompt_ids=[c for m in messages for c in _codes(m)],
            token_ids=tokens,
            logprobs=[-0.5] * len(tokens),
            sampling=sampling,
            segments=[Segment(policy_version=self.version, num_tokens=len(tokens))],
            policy_version=self.version,
            engine="scripted",
        )


def _codes(message: Message) -> list[int]:
    """Return a message's tokens; an assistant's message ends as it was sampled."""
    end = [0] if message.get("role") == "assistant" else []
    return [ord(c) for c in str(message.get("content") or "")] + end
