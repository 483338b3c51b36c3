"""OpenAI's chat format: from answers to JSON, whole or piece by piece."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..inference.policy import Completion
from .requests import Asked

_PIECE = 64
"""Characters of a streamed piece."""
_REASONS = {"stop": "stop", "length": "length", "abort": "length", "timeout": "length"}

TokenText = Callable[[int], str]
"""What one token says."""


def response(
    name: str,
    created: int,
    asked: Asked,
    model: str,
    completions: Sequence[Completion],
    *,
    token_text: TokenText,
    session_id: str,
) -> dict[str, Any]:
    """Return the whole answer to a request that is not streamed."""
    choices = [
        _choice(i, one, asked, token_text) | {"message": _said(one)}
        for i, one in enumerate(completions)
    ]
    summary = _head(name, created, model, "chat.completion")
    summary |= {"choices": choices, "usage": usage(completions), "session_id": session_id}
    if asked.wants_token_ids:  # as vLLM places them
        summary["prompt_token_ids"] = _ids(completions[0].prompt_ids)
    return summary


class Chunks:
    """Makes the pieces of a streamed answer: its beginning, texts as they come, and its end.

    Tokens and log-probs, where they are asked for, come at the end of each choice, all of them:
    only then are they what is recorded, and a text may be held back longer than its tokens.
    """

    def __init__(
        self, name: str, created: int, asked: Asked, model: str, *, session_id: str
    ) -> None:
        self._asked = asked
        self._head = _head(name, created, model, "chat.completion.chunk")
        self._head["session_id"] = session_id

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield who speaks, for each choice."""
        for i in range(self._asked.n):
            yield self._piece(_delta(i, {"role": "assistant", "content": ""}))

    def said(self, i: int, text: str) -> Iterator[dict[str, Any]]:
        """Yield what a choice says next."""
        for at in range(0, len(text), _PIECE):
            yield self._piece(_delta(i, {"content": text[at : at + _PIECE]}))

    def end(
        self, completions: Sequence[Completion], left: Sequence[str], *, token_text: TokenText
    ) -> Iterator[dict[str, Any]]:
        """Yield what is left of each content, calls, and what is known at the end."""
        for i, (one, text) in enumerate(zip(completions, left, strict=True)):
            yield from self.said(i, text)
            for k, call in enumerate(one.answer.get("tool_calls") or ()):
                yield self._piece(_delta(i, {"tool_calls": [{"index": k, **call}]}))
            yield self._piece(_choice(i, one, self._asked, token_text) | {"delta": {}})
        if self._asked.wants_usage:
            yield self._head | {"choices": [], "usage": usage(completions)}

    def _piece(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"choices": [choice]}


def content(one: Completion) -> str:
    """Return what an answer says beside its calls."""
    return str(one.answer.get("content") or "")


def usage(completions: Sequence[Completion]) -> dict[str, int]:
    """Return how many tokens were read and sampled; 0 where the engine does not say."""
    prompt = len(completions[0].prompt_ids or ()) if completions else 0
    sampled = sum(len(one.token_ids or ()) for one in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def event(told: Mapping[str, Any] | str) -> bytes:
    """Return a server-sent event."""
    text = told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def _head(name: str, created: int, model: str, kind: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": created, "model": model}


def _said(one: Completion) -> dict[str, Any]:
    answer = dict(one.answer)
    if answer.get("tool_calls") and not answer.get("content"):
        answer["content"] = None
    return answer | {"refusal": None}


def _choice(i: int, one: Completion, asked: Asked, token_text: TokenText) -> dict[str, Any]:
    calls = one.answer.get("tool_calls")
    reason = "tool_calls" if calls else _REASONS.get(one.finish_reason, one.finish_reason)
    message: dict[str, Any] = {
        "index": i,
        "finish_reason": reason,
        "logprobs": _logprobs(one, token_text) if asked.wants_logprobs else None,
        "policy_version": one.policy_version,
    }
    if asked.wants_token_ids:
        message["token_ids"] = _ids(one.token_ids)
        message["prompt_token_ids"] = _ids(one.prompt_ids)
    return message


def _ids(ids: Sequence[int] | None) -> list[int] | None:
    return None if ids is None else list(ids)


def _logprobs(one: Completion, token_text: TokenText) -> dict[str, Any] | None:
    if one.token_ids is None or one.logprobs is None:
        return None
    content = []
    for token, value in zip(one.token_ids, one.logprobs, strict=True):
        text = token_text(token)
        spelled = list(text.encode("utf-8", "replace"))
        content.append({"token": text, "logprob": value, "bytes": spelled, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _delta(i: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": i, "delta": delta, "finish_reason": None, "logprobs": None}
