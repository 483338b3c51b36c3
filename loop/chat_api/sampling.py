"""How a request wants its answers sampled: the fields of OpenAI and of vLLM."""

import json
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ...store.errors import nearest
from ..inference.grammars import offered
from ..inference.policy import Sampling
from .errors import RequestError
from .messages import bounded, kind_of, tools_of, whole_text

MOST_STOPS = 16
MOST_BIASES = 1024
"""Most tokens in `logit_bias`, as in vLLM."""
MOST_TOP = 20
"""Most likeliest tokens reported for a sampled one, as in OpenAI's API."""
_LARGEST = (1 << 63) - 1
_DIRECT = (
    *("temperature", "top_p", "min_p", "stop", "seed", "min_tokens", "ignore_eos", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "truncate_prompt_tokens"),
    *("top_logprobs", "json_schema"),
)


def _format(value: Any) -> str | None:
    """Return the JSON schema of a `response_format`; None: text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return json.dumps({"type": "object"})
    form = value.get("json_schema") if kind == "json_schema" else None
    schema = form.get("schema") if isinstance(form, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(
            '`response_format` must be {"type": "text"}, {"type": "json_object"} or {"type": '
            f'"json_schema", "json_schema": {{"name": ..., "schema": {{...}}}}}}, '
            f"got {value!r:.200}",
            param="response_format",
        )
    return json.dumps(bounded(schema, "response_format"))


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise RequestError("`stop` must be a text, or a list of texts", param="stop")
    if len(stops) > MOST_STOPS:
        raise RequestError(f"`stop` has at most {MOST_STOPS} texts", param="stop")
    return tuple(whole_text(stop, "stop") for stop in stops)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        message = f"`logit_bias` must be an object of tokens and biases, got {kind_of(value)}"
        raise RequestError(message, param="logit_bias")
    if len(value) > MOST_BIASES:
        message = f"`logit_bias` has {len(value):,} tokens, at most {MOST_BIASES:,} are possible"
        raise RequestError(message, param="logit_bias")
    made = []
    for token, bias in value.items():
        is_token = token.isascii() and token.isdigit() and len(token) < 10
        is_bias = isinstance(bias, int | float) and not isinstance(bias, bool) and abs(bias) <= 100
        if not (is_token and is_bias):
            raise RequestError(
                f"`logit_bias` has {token!r:.50}: {bias!r:.50}, expected the number of a token and "
                "a bias from -100 to 100",
                param="logit_bias",
            )
        made.append((int(token), float(bias)))
    return tuple(made)


class SamplingRequest(BaseModel):
    """The part of a request that says how to sample."""

    # Strict: a number in quotes is a client's mistake, and guessing would change the tokens.
    model_config = ConfigDict(strict=True, frozen=True)

    given_tools: Annotated[list[dict[str, Any]] | None, BeforeValidator(tools_of)] = Field(
        default=None, validation_alias="tools"
    )
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] = "auto"
    temperature: float | None = Field(default=None, ge=0, le=2)
    # 0 would leave no token to sample
    top_p: float | None = Field(default=None, ge=1e-9, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=_LARGEST)
    """0 or -1, as in vLLM: all tokens."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1, le=_LARGEST)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_LARGEST)
    """The newer name of `max_tokens`, which it overrides."""
    stop: Annotated[tuple[str, ...] | None, BeforeValidator(_stops)] = None
    min_tokens: int | None = Field(default=None, ge=0, le=_LARGEST)
    ignore_eos: bool | None = None
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Annotated[tuple[tuple[int, float], ...] | None, BeforeValidator(_biases)] = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=1, le=_LARGEST)
    json_schema: Annotated[str | None, BeforeValidator(_format)] = Field(
        default=None, validation_alias="response_format"
    )
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP)
    seed: int | None = Field(default=None, ge=-_LARGEST - 1, le=_LARGEST)

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call."""
        return (self.given_tools or None) if self.tool_choice != "none" else None

    @property
    def forced_tools(self) -> tuple[str, ...]:
        """The tools of which one must be called. Raises RequestError for one that is unknown."""
        names = offered(self.tools)
        if isinstance(self.tool_choice, str):
            if self.tool_choice == "required" and not names:
                message = "`tool_choice` is `required`, and there are no `tools`; give some"
                raise RequestError(message, param="tool_choice")
            return tuple(names) if self.tool_choice == "required" else ()
        function = self.tool_choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if self.tool_choice.get("type") != "function" or not isinstance(name, str):
            raise RequestError(
                "`tool_choice` must be none, auto, required, or "
                f'{{"type": "function", "function": {{"name": ...}}}}, '
                f"got {self.tool_choice!r:.200}",
                param="tool_choice",
            )
        if name not in names:
            message = f"`tool_choice` names the tool `{name:.100}`, which is not in `tools`"
            raise RequestError(f"{message}{nearest(name, names)}", param="tool_choice")
        return (name,)

    def sampling(self, default: Sampling) -> Sampling:
        """Return how to sample: the default with the request's parameters."""
        values = {name: getattr(self, name) for name in _DIRECT}
        values["top_k"] = max(self.top_k, 0) if self.top_k is not None else None
        values["max_tokens"] = self.max_completion_tokens or self.max_tokens
        values["forced_tools"] = self.forced_tools
        made = replace(default, **{name: v for name, v in values.items() if v is not None})
        if self.min_tokens and self.min_tokens > made.max_tokens:
            message = f"`min_tokens` is {self.min_tokens}, more than the {made.max_tokens} at most"
            raise RequestError(message, param="min_tokens")
        if self.json_schema is not None or self.forced_tools:  # the grammar says where it ends
            return replace(made, min_tokens=0, ignore_eos=False)
        # a default of the server must not exceed what the request asks for
        return replace(made, min_tokens=min(made.min_tokens, made.max_tokens))

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        is_forced = bool(self.forced_tools)  # raises RequestError
        if self.json_schema is not None and self.tools:
            message = "`response_format` leaves no call of `tools` possible; set one of them only"
            raise RequestError(message, param="response_format")
        for name in ("min_tokens", "ignore_eos"):
            if (is_forced or self.json_schema is not None) and getattr(self, name):
                message = f"`{name}` does not go with a grammar, which says where an answer ends"
                raise RequestError(message, param=name)
        return self
