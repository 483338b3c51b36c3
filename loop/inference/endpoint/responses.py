"""Read replies of chat endpoints: any JSON becomes a Completion, or an error of one line."""

from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from ....operators.endpoint_replies import shown
from ....store.errors import first_invalid
from ....store.records import Message
from ...models.reasoning import split_reasoning
from ..policy import Completion, PolicyError, Timing

_SHOWN = 120
_REASONS = {"length": "length", "tool_calls": "tool_calls", "content_filter": "abort"}
# Within int32, the type of the column `token_ids`.
_TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Function(BaseModel):
    name: str
    arguments: str = ""


class _Call(BaseModel):
    function: _Function
    id: str | None = None


class _Message(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """What newer servers of vLLM call it."""
    tool_calls: list[_Call] | None = None

    def message(self) -> Message:
        """Return it as a message of a conversation."""
        made: Message = {"role": "assistant", "content": self.content or ""}
        if thought := self.reasoning_content or self.reasoning:
            made["reasoning_content"] = thought
        if self.tool_calls:
            made["tool_calls"] = [
                call.model_dump() | {"id": call.id or f"call_{i}", "type": "function"}
                for i, call in enumerate(self.tool_calls)
            ]
        return made


class _Token(BaseModel):
    # One that is not finite would make the loss of its whole update NaN.
    logprob: float = Field(allow_inf_nan=False)


class _Logprobs(BaseModel):
    content: list[_Token] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[_TokenId] | None = None
    prompt_token_ids: list[_TokenId] | None = None


class _Answer(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    prompt_token_ids: list[_TokenId] | None = None


def completion(
    body: bytes,
    *,
    engine: str,
    keeps_logprobs: bool,
    timing: Timing,
    reasoning_format: str | None = None,
) -> Completion:
    """Return the first choice of a reply, with its tokens and log-probs if it has them.

    A thought in its content is separated if there is a `reasoning_format`.
    Log-probs without token ids are dropped, since their tokens are unknown. Raises PolicyError, in
    one line, for anything other than a chat completion.
    """
    try:
        answer = _Answer.model_validate_json(body)
    except ValidationError as error:
        where, message, _ = first_invalid(error)
        why = f"{where}: {message}" if where else message
        raise PolicyError(
            f"`{engine}` gave no chat completion ({why[:_SHOWN]}), but {shown(body)}"
        ) from None
    choice = answer.choices[0]
    message = choice.message.message()
    if reasoning_format is not None and "reasoning_content" not in message:
        thought, rest = split_reasoning(str(message["content"]), reasoning_format)
        message |= {} if thought is None else {"content": rest, "reasoning_content": thought}
    return Completion(
        text=str(message["content"]),
        finish_reason=_REASONS.get(choice.finish_reason or "", "stop"),
        message=message,
        engine=engine,
        timing=timing,
        **_tokens(choice, answer, engine, keeps_logprobs=keeps_logprobs),
    )


def _tokens(
    choice: _Choice, answer: _Answer, engine: str, *, keeps_logprobs: bool
) -> dict[str, Any]:
    prompt_ids = choice.prompt_token_ids or answer.prompt_token_ids
    # Without the prompt's tokens, those of the answer are no sequence to train on.
    if choice.token_ids is None or not prompt_ids:
        return {}
    given = choice.logprobs.content if choice.logprobs else None
    if given is not None and len(given) != len(choice.token_ids):
        raise PolicyError(
            f"`{engine}` gave {len(given)} log-probs for {len(choice.token_ids)} token ids"
        )
    logprobs = [token.logprob for token in given] if given is not None and keeps_logprobs else None
    return {"prompt_ids": prompt_ids, "token_ids": choice.token_ids, "logprobs": logprobs}
