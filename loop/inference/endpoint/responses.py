"""What chat endpoints answer: JSON that may be anything becomes a Completion, or a line of why."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from ....store.records import Message
from ..policy import Completion, PolicyError, Timing

SHOWN = 120
"""Most characters of an answer that an error shows."""
_REASONS = {"length": "length", "tool_calls": "tool_calls", "content_filter": "abort"}
_TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Function(BaseModel):
    name: str
    arguments: str = ""


class _Call(BaseModel):
    function: _Function
    id: str | None = None


class _Said(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None

    def message(self) -> Message:
        """Return it as a message of a conversation."""
        said: Message = {"role": "assistant", "content": self.content or ""}
        if self.reasoning_content:
            said["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            said["tool_calls"] = [
                {
                    "id": call.id or f"call_{i}",
                    "type": "function",
                    "function": call.function.model_dump(),
                }
                for i, call in enumerate(self.tool_calls)
            ]
        return said


class _Token(BaseModel):
    logprob: float = Field(allow_inf_nan=False)


class _Logprobs(BaseModel):
    content: list[_Token] | None = None


class _Choice(BaseModel):
    message: _Said
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[_TokenId] | None = None
    prompt_token_ids: list[_TokenId] | None = None


class _Answer(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    prompt_token_ids: list[_TokenId] | None = None


class _Refusal(BaseModel):
    message: str = ""
    code: str | int | None = None


class _Refused(BaseModel):
    error: _Refusal | str


def completion(body: bytes, *, engine: str, keeps_logprobs: bool, timing: Timing) -> Completion:
    """Return the first choice of an answer; tokens and log-probs only where it gives them.

    Log-probs are kept beside token ids alone: without these nobody can say whose they are. Raises
    PolicyError, in one line, for what is no chat completion.
    """
    try:
        summary = _Answer.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        why = f"{place}: {first['msg']}" if place else first["msg"]
        raise PolicyError(
            f"`{engine}` gave no chat completion ({why[:SHOWN]}), but {shown(body)}"
        ) from None
    choice = summary.choices[0]
    message = choice.message.message()
    return Completion(
        text=str(message["content"]),
        finish_reason=_REASONS.get(choice.finish_reason or "", "stop"),
        message=message,
        engine=engine,
        timing=timing,
        **_tokens(choice, summary, engine, keeps_logprobs),
    )


def _tokens(choice: _Choice, told: _Answer, engine: str, keeps_logprobs: bool) -> dict[str, Any]:  # noqa: FBT001
    prompt_ids = choice.prompt_token_ids or told.prompt_token_ids
    if choice.token_ids is None or not prompt_ids:
        return {}
    given = choice.logprobs.content if choice.logprobs else None
    if given is not None and len(given) != len(choice.token_ids):
        raise PolicyError(
            f"`{engine}` gave {len(given)} log-probs for {len(choice.token_ids)} token ids"
        )
    logprobs: Sequence[float] | None = None
    if given is not None and keeps_logprobs:
        logprobs = [token.logprob for token in given]
    return {"prompt_ids": prompt_ids, "token_ids": choice.token_ids, "logprobs": logprobs}


def refusal(status: int, body: bytes) -> tuple[str, str]:
    """Return what an answer with an error says in one line, and the finish reason that it means."""
    try:
        error = _Refused.model_validate_json(body).error
        summary = _Refusal(message=error) if isinstance(error, str) else error
    except ValidationError:
        return f"{status}: {shown(body)}", "engine_error"
    text = " ".join(summary.message.split())
    is_long = summary.code == "context_length_exceeded" or "maximum context length" in text
    return f"{status}: {text[:300]}", "context_overflow" if is_long else "engine_error"


def shown(body: bytes) -> str:
    """Return the beginning of an answer, for an error's one line."""
    text = " ".join(body[: 4 * SHOWN].decode(errors="replace").split())
    cut = "..." if len(text) > SHOWN or len(body) > 4 * SHOWN else ""
    return f"`{text[:SHOWN]}{cut}` ({len(body)} bytes)"
