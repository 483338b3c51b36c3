"""OpenAI's chat format: from completions to JSON, whole or streamed.

Plain dictionaries, not models of `openai.types`: encoding a streamed piece takes 4 us this way and
69 us through a model, for every token, and importing the types takes a second.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..inference.policy import Completion
from ..models.reasoning import MarkedParts
from .requests import ChatRequest

_PIECE = 64
"""Most characters of a streamed piece."""
_REASONS = {"stop": "stop", "length": "length", "abort": "length", "timeout": "length"}

TokenText = Callable[[int], str]
"""Returns the text of one token."""


def response(
    head: Mapping[str, Any],
    asked: ChatRequest,
    completions: Sequence[Completion],
    token_text: TokenText,
) -> dict[str, Any]:
    """Return the answer to a request that is not streamed."""
    choices = [
        _choice(i, one, asked, token_text) | {"message": _message(one)}
        for i, one in enumerate(completions)
    ]
    made = {**head, "choices": choices, "usage": usage(completions)}
    if asked.wants_token_ids:  # as vLLM places them
        made["prompt_token_ids"] = completions[0].prompt_ids
    return made


class Chunks:
    """The pieces of a streamed answer: its beginning, its text as it is sampled, and its end.

    Tokens and log-probs, if requested, all come at the end of each choice: only then are they
    final, and a text may be held back longer than its tokens.
    """

    def __init__(self, head: Mapping[str, Any], asked: ChatRequest, token_text: TokenText) -> None:
        self._head, self._asked, self._token_text = head, asked, token_text
        self._parts = [MarkedParts() for _ in range(asked.n)]

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the role of each choice."""
        for i in range(self._asked.n):
            yield self._delta(i, role="assistant", content="")

    def text(self, i: int, text: str) -> Iterator[dict[str, Any]]:
        """Yield the next text of a choice."""
        for is_thought, part in self._parts[i](text):
            name = "reasoning_content" if is_thought else "content"
            for at in range(0, len(part), _PIECE):
                yield self._delta(i, **{name: part[at : at + _PIECE]})

    def end(
        self, completions: Sequence[Completion], left: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        """Yield the rest of each text, the tool calls, the finish reasons, and the usage."""
        for i, (one, text) in enumerate(zip(completions, left, strict=True)):
            yield from self.text(i, text)
            for k, call in enumerate(one.answer.get("tool_calls") or ()):
                yield self._delta(i, tool_calls=[{"index": k, **call}])
            choice = _choice(i, one, self._asked, self._token_text) | {"delta": {}}
            yield {**self._head, "choices": [choice]}
        if self._asked.wants_usage:
            yield {**self._head, "choices": [], "usage": usage(completions)}

    def _delta(self, i: int, **delta: Any) -> dict[str, Any]:
        choice = {"index": i, "delta": delta, "finish_reason": None, "logprobs": None}
        return {**self._head, "choices": [choice]}


def content(one: Completion) -> str:
    """Return the text of an answer, without its tool calls."""
    return str(one.answer.get("content") or "")


def usage(completions: Sequence[Completion], n: int = 0) -> dict[str, int]:
    """Return the number of prompt and sampled tokens; 0 if the engine does not report them.

    Each `n` completions share a prompt; 0: all of them.
    """
    first = completions[:: n or max(len(completions), 1)]
    prompt = sum(len(one.prompt_ids or ()) for one in first)
    sampled = sum(len(one.token_ids or ()) for one in completions)
    total = prompt + sampled
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": total}


def finish_reason(one: Completion) -> str:
    """Return why an answer ended, in OpenAI's words."""
    return _REASONS.get(one.finish_reason, one.finish_reason)


def event(data: Mapping[str, Any] | str) -> bytes:
    """Return a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def _message(one: Completion) -> dict[str, Any]:
    answer = dict(one.answer)
    if answer.get("tool_calls") and not answer.get("content"):
        # As OpenAI writes it: some clients take an empty text for an answer.
        answer["content"] = None
    return answer | {"refusal": None}


def _choice(i: int, one: Completion, asked: ChatRequest, token_text: TokenText) -> dict[str, Any]:
    calls = one.answer.get("tool_calls")
    reason = "tool_calls" if calls else finish_reason(one)
    choice: dict[str, Any] = {
        "index": i,
        "finish_reason": reason,
        "logprobs": _logprobs(one, token_text) if asked.wants_logprobs else None,
        "policy_version": one.policy_version,
    }
    if asked.wants_token_ids:
        choice |= {"token_ids": one.token_ids, "prompt_token_ids": one.prompt_ids}
    return choice


def _logprobs(one: Completion, token_text: TokenText) -> dict[str, Any] | None:
    content = token_logprobs(one, token_text)
    return None if content is None else {"content": content, "refusal": None}


def token_logprobs(one: Completion, token_text: TokenText) -> list[dict[str, Any]] | None:
    """Return the log-prob of each token with those of the likeliest; None: not reported."""
    if one.token_ids is None or one.logprobs is None:
        return None
    made = []
    tops = one.top_logprobs or [()] * len(one.token_ids)
    for token, value, top in zip(one.token_ids, one.logprobs, tops, strict=True):
        likeliest = [_token(other, logprob, token_text) for other, logprob in top]
        made.append(_token(token, value, token_text) | {"top_logprobs": likeliest})
    return made


def _token(token: int, logprob: float, token_text: TokenText) -> dict[str, Any]:
    text = token_text(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}
