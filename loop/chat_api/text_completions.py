"""OpenAI's completions API: raw prompts, of text or of tokens, without a chat template."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ...store.records import Message
from ..inference.policy import Completion
from . import responses
from .errors import RequestError
from .exchange import ChatExchange
from .messages import kind_of, whole_text
from .requests import ChatRequest, parameters_of, validated
from .sampling import MOST_TOP

MOST_PROMPTS = 64
"""Most prompts of one request."""
LARGEST_TOKEN = 1 << 31


def _prompts(value: Any) -> list[str | list[int]]:
    one_of = isinstance(value, list) and value and all(isinstance(part, int) for part in value)
    prompts: list[Any] = [value] if isinstance(value, str) or one_of else value
    if not isinstance(prompts, list) or not prompts:
        what = "a text, a list of tokens, or a list of these"
        raise RequestError(f"`prompt` must be {what}, got {kind_of(value)}", param="prompt")
    if len(prompts) > MOST_PROMPTS:
        message = f"`prompt` has {len(prompts)} prompts, at most {MOST_PROMPTS} are possible"
        raise RequestError(message, param="prompt")
    for prompt in prompts:
        tokens = prompt if isinstance(prompt, list) else []
        are_tokens = all(type(token) is int and 0 <= token < LARGEST_TOKEN for token in tokens)
        if isinstance(prompt, str):
            whole_text(prompt, "prompt")
        elif not tokens or not are_tokens:
            message = f"`prompt` has {prompt!r:.100}, expected a text or a list of tokens"
            raise RequestError(message, param="prompt")
    return prompts


class TextRequest(ChatRequest):
    """A checked request for continuations of raw prompts."""

    messages: list[Message] = Field(default=[], init=False)
    prompts: Annotated[list[str | list[int]], BeforeValidator(_prompts)] = Field(
        validation_alias="prompt"
    )

    def conversations(self, text: Callable[[list[int]], str]) -> list[list[Message]]:
        """Return each prompt as a message that is marked as raw."""
        return [[_message(prompt, text)] for prompt in self.prompts]


def _message(prompt: str | list[int], text: Callable[[list[int]], str]) -> Message:
    if isinstance(prompt, str):
        return {"role": "user", "content": prompt, "is_raw": True}
    return {"role": "user", "content": text(prompt), "is_raw": True, "token_ids": prompt}


_KNOWN = parameters_of(TextRequest) - {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "modalities", "top_logprobs"),
    "max_completion_tokens",
}


def read(body: Mapping[str, Any]) -> TextRequest:
    """Return the request in a body of `/v1/completions`. Raises RequestError."""
    number = body.get("logprobs")
    if number is not None and not (type(number) is int and 0 <= number <= MOST_TOP):
        message = f"`logprobs` must be a number from 0 to {MOST_TOP}, got {number!r:.100}"
        raise RequestError(message, param="logprobs")
    asked = validated(TextRequest, {"prompt": None, **body, "logprobs": number is not None}, _KNOWN)
    if asked.is_streamed and len(asked.prompts) > 1:
        message = "`stream` goes with one `prompt`; send a request for each"
        raise RequestError(message, param="stream")
    return asked.model_copy(update={"top_logprobs": number})


def whole(exchange: ChatExchange) -> dict[str, Any]:
    """Return the answer to a request that is not streamed."""
    asked, done = exchange.asked, exchange.completions
    choices = [_choice(i, one, exchange, one.text) for i, one in enumerate(done)]
    head = exchange.head("text_completion")
    return {**head, "choices": choices, "usage": responses.usage(done, asked.n)}


class TextChunks:
    """The pieces of a streamed continuation; log-probs and tokens come with the last one."""

    def __init__(self, exchange: ChatExchange) -> None:
        self._exchange, self._head = exchange, exchange.head("text_completion")

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield nothing: pieces need no beginning."""
        yield from ()

    def text(self, i: int, text: str) -> Iterator[dict[str, Any]]:
        """Yield the next text of a choice."""
        choice = {"index": i, "text": text, "finish_reason": None, "logprobs": None}
        yield {**self._head, "choices": [choice]}

    def end(
        self, completions: Sequence[Completion], left: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        """Yield the rest of each text with its finish reason, and the usage."""
        for i, (one, text) in enumerate(zip(completions, left, strict=True)):
            yield {**self._head, "choices": [_choice(i, one, self._exchange, text)]}
        if self._exchange.asked.wants_usage:
            used = responses.usage(completions, self._exchange.asked.n)
            yield {**self._head, "choices": [], "usage": used}


def _choice(i: int, one: Completion, exchange: ChatExchange, text: str) -> dict[str, Any]:
    asked = exchange.asked
    made = {"index": i, "text": text, "finish_reason": responses.finish_reason(one)}
    made |= {"logprobs": None, "policy_version": one.policy_version}
    if asked.wants_logprobs:
        made["logprobs"] = _logprobs(one, exchange.token_text)
    if asked.wants_token_ids:
        made |= {"token_ids": one.token_ids, "prompt_token_ids": one.prompt_ids}
    return made


def _logprobs(one: Completion, token_text: responses.TokenText) -> dict[str, Any] | None:
    found = responses.token_logprobs(one, token_text)
    if found is None:
        return None
    tokens = [token["token"] for token in found]
    offsets = [0, *accumulate(map(len, tokens))][:-1]
    tops = [{t["token"]: t["logprob"] for t in token["top_logprobs"]} for token in found]
    return {
        "tokens": tokens,
        "token_logprobs": [token["logprob"] for token in found],
        "top_logprobs": tops if one.top_logprobs is not None else None,
        "text_offset": offsets,
    }
