"""Sample the answers to a request from a policy, and say why it refused."""

import secrets
from dataclasses import replace

from ...store.records import Message
from ..inference.policy import Completion, Policy, PolicyError, default_sampling
from .errors import RequestError
from .requests import ChatRequest
from .sessions import Session

_STATUS = {
    "context_overflow": 400,
    "template_error": 400,
    "invalid_request": 400,
    "timeout": 504,
    "engine_error": 503,
}


async def generate(
    policy: Policy, asked: ChatRequest, messages: list[Message], session: Session
) -> tuple[list[Message], list[Completion]]:
    """Return the answers, and the messages that they answer. Raises RequestError."""
    # of chance, unless the request has a seed: equal requests expect different answers
    seeded = replace(default_sampling(policy), seed=secrets.randbits(48))
    sampling = asked.sampling(seeded)
    while True:
        try:
            made = await policy.generate(
                messages,
                n=asked.n,
                tools=asked.tools,
                sampling=sampling,
                earlier=list(session.turns),
            )
            return messages, made
        except PolicyError as error:
            shorter = _without_oldest(messages) if asked.truncates else None
            if error.finish_reason != "context_overflow" or shorter is None:
                raise _refusal(error) from error
            messages = shorter


def _without_oldest(messages: list[Message]) -> list[Message] | None:
    """Return a conversation without its oldest messages but the system's; None: nothing is left.

    What follows begins with a user's message, since calls and their outputs belong together.
    """
    system = [m for m in messages[:1] if m.get("role") == "system"]
    rest = messages[len(system) :]
    users = [i for i, m in enumerate(rest) if m.get("role") == "user" and i > 0]
    return [*system, *rest[users[0] :]] if users else None


def _refusal(error: PolicyError) -> RequestError:
    status = _STATUS.get(error.finish_reason, 500)
    codes = {"context_overflow": "context_length_exceeded"}
    return RequestError(
        str(error)[:2000],
        status=status,
        param=error.param or ("messages" if status == 400 else None),
        code=codes.get(error.finish_reason, error.finish_reason),
        retry_after=1.0 if status == 503 else None,
    )
