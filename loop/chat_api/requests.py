"""OpenAI's chat format: from the JSON of a request to the arguments of a policy.

Independent of HTTP servers. A parameter that is not supported is refused by its name; one that is
known to change no token (`store`, `service_tier`) is ignored.
"""

import json
import string
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar
from urllib.parse import quote, unquote

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from ...store.errors import nearest
from ...store.records import Message
from .errors import RequestError
from .messages import kind_of, messages_of, whole_text
from .sampling import SamplingRequest

MOST_CHOICES = 64
"""Most answers to one request."""
IGNORED = frozenset(
    (
        *("store", "parallel_tool_calls", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("cache_salt", "priority"),
    )
)
"""Parameters of OpenAI and of vLLM that change no token here: hints, and names for bills."""
LONGEST_ID = 200
"""Most characters of the name of a session or group."""


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body. Raises RequestError for anything else."""
    try:
        # Python also reads NaN and Infinity, which JSON lacks and no sampling setting allows
        message = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        why = "is nested too deep" if isinstance(error, RecursionError) else f"is not JSON: {error}"
        raise RequestError(f"the request's body {why}") from error
    if not isinstance(message, dict):
        raise RequestError(f"the request's body must be an object, got {kind_of(message)}")
    return message


def identifier(value: Any, param: str) -> str | None:
    """Return a valid name of a session or group. Raises RequestError for any other value."""
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_ID or not value.isprintable():
        message = f"`{param}` must be a text of 1 to {LONGEST_ID} printable characters"
        raise RequestError(message, param=param)
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


Request = TypeVar("Request", bound="ChatRequest")

_request_id = partial(identifier, param="request_id")


class ChatRequest(SamplingRequest):
    """A checked request for answers; `null` stands for a parameter that is not given."""

    messages: Annotated[list[Message], BeforeValidator(messages_of)]
    model: Annotated[str, AfterValidator(partial(whole_text, where="model"))] | None = None
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    is_streamed: bool = Field(default=False, validation_alias="stream")
    wants_logprobs: bool = Field(default=False, validation_alias="logprobs")
    wants_token_ids: bool = Field(default=False, validation_alias="return_token_ids")
    stream_options: dict[str, Any] = Field(default={})
    modalities: tuple[Literal["text"], ...] | None = Field(default=None, strict=False)
    metadata: dict[str, Any] = Field(default={})
    user: Any = None
    request_id: Annotated[str | None, BeforeValidator(_request_id)] = None
    """The client's name of the request, as in vLLM; the same in a retry."""

    previous_id: ClassVar[str | None] = None
    """The response that the conversation continues, in OpenAI's responses API."""
    truncates: ClassVar[bool] = False
    """Whether the oldest messages are left out where a prompt is too long."""

    def conversations(self, text: Callable[[list[int]], str]) -> list[list[Message]]:
        """Return what is to be answered; `text` decodes tokens."""
        return [self.messages]

    @property
    def wants_usage(self) -> bool:
        """Whether a streamed answer ends with the number of tokens."""
        return bool(self.stream_options.get("include_usage"))

    @property
    def session_id(self) -> str | None:
        """The name of the session: `metadata.session_id`, or else `user`."""
        session, user = self.metadata.get("session_id"), self.user
        session = user if session is None and isinstance(user, str) and user else session
        return identifier(session, "metadata.session_id")

    @property
    def group_id(self) -> str | None:
        """The name of the group: `metadata.group_id`."""
        return identifier(self.metadata.get("group_id"), "metadata.group_id")

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        _ = self.session_id, self.group_id  # raise RequestError
        if self.top_logprobs and not self.wants_logprobs:
            message = "`top_logprobs` goes with `logprobs`: true; set it too"
            raise RequestError(message, param="top_logprobs")
        return self


def parameters_of(kind: type[ChatRequest]) -> frozenset[str]:
    """Return the names of the parameters of a kind of request, with those that are ignored."""
    fields = kind.model_fields.items()
    return IGNORED | {str(field.validation_alias or name) for name, field in fields}


KNOWN = parameters_of(ChatRequest)
"""The parameters of a chat request."""


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Return the request in a body of `/v1/chat/completions`. Raises RequestError."""
    # None, so that missing messages are refused in our words too
    return validated(ChatRequest, {"messages": None, **body}, KNOWN)


def validated(kind: type[Request], body: Mapping[str, Any], known: Collection[str]) -> Request:
    """Return a request whose parameters are all known and valid. Raises RequestError."""
    for name, value in body.items():
        if name not in known and value is not None:
            hint = near if (near := nearest(name, known)).endswith("?") else "; leave it out"
            raise RequestError(f"`{name:.100}` is not supported{hint}", param=name[:100])
    if body.get("parallel_tool_calls") is False and body.get("tools"):
        message = "`parallel_tool_calls` cannot be turned off; leave it out"
        raise RequestError(message, param="parallel_tool_calls")
    try:
        return kind.model_validate({k: v for k, v in body.items() if v is not None or k in _NEEDED})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if isinstance(cause := first.get("ctx", {}).get("error"), RequestError):
            raise cause from None
        param = str(first["loc"][0])
        message = first["msg"].replace("Input should be", "must be")
        message = f"`{param}` {message}, got {first['input']!r:.100}"
        raise RequestError(message, param=param) from error


_NEEDED = ("messages", "prompt")
_AS_THEY_ARE = (string.punctuation + "~").replace("%", "")


def for_header(name: str) -> str:
    """Return a name, percent-encoded for a header.

    >>> for_header("agent-7"), for_header("žluť 50%")
    ('agent-7', '%C5%BElu%C5%A5%2050%25')
    """
    return quote(name, safe=_AS_THEY_ARE)


def of_header(headers: Mapping[str, str], name: str) -> str | None:
    """Return the name in a header, plain or percent-encoded. Raises RequestError.

    >>> of_header({"X-Session-Id": "%C5%BElu%C5%A5"}, "X-Session-Id")
    'žluť'
    """
    message = headers.get(name)
    if message is None:
        return None
    try:
        text = message.encode("latin-1").decode()  # undoes the decoding of HTTP headers
    except UnicodeError:
        text = message
    try:
        return identifier(unquote(text, errors="strict"), name)
    except UnicodeDecodeError:
        raise RequestError(f"`{name}` must be percent-encoded UTF-8", param=name) from None
