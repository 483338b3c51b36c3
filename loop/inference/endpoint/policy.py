"""A policy behind an HTTP endpoint that speaks OpenAI's chat API."""

import asyncio
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from ....operators.concurrency import shared_semaphore
from ....operators.endpoint import EndpointClient
from ....operators.endpoint_replies import NoAnswerError
from ....store.errors import ConfigError, NotFoundError
from ....store.image_parts import media_ids
from ....store.media import with_data_urls
from ....store.records import Message
from ....store.tables import Tables
from ...config import Endpoint, FrozenModel
from ...models.reasoning import ReasoningStream
from ..event_loop import all_of, run_on, shared_loop
from ..policy import OTHERS, Completion, PolicyError, Sampling, Timing, Tools, Turn
from ..token_stream import TextDecoder, TokenCallback, current_callbacks
from .responses import completion


class EndpointPolicy:
    """A model behind an endpoint, with weights that rlake does not train.

    Rows have token ids only if the endpoint reports them (rlake's own server does; vLLM's with
    `extra_body: {return_token_ids: true}`), and log-probs only if they are of the full distribution
    at the sampling temperature. Rows of text alone can be imitated, judged or compared, but not
    weighted by a ratio of policies.

    `EndpointClient` retries; its final failure is a PolicyError. An answer without tools is
    requested as a stream if it is streamed to anyone.
    """

    version: int | None = None

    def __init__(
        self,
        settings: Endpoint,
        *,
        sampling: Sampling | None = None,
        first_wait: float = 0.5,
        model: FrozenModel | None = None,
        store: Tables | None = None,
    ) -> None:
        """Use the endpoint of `settings`; the first retry waits `first_wait` seconds.

        Images of the `store` that messages name are sent as data URLs. The system prompt and the
        template's arguments of `model` are sent. Raises ConfigError if it has a template or scales
        positions, which an endpoint does not take.
        """
        if model is not None and model.rope_parameters is not None:
            raise ConfigError(
                "an endpoint embeds positions as its own model says; leave "
                "`model.rope_parameters` out, or start the endpoint's server with them"
            )
        if model is not None and model.chat_template is not None:
            raise ConfigError(
                "an endpoint writes conversations with its own template; leave "
                "`model.chat_template` out, or start the endpoint's server with it"
            )
        self._system = None if model is None else model.system_prompt
        self._reasoning = None if model is None else model.reasoning_format
        self._kwargs = {} if model is None else model.chat_template_kwargs
        self.settings, self.sampling = settings, sampling or Sampling()
        self.media_store = store
        """The store of the images that messages may show."""
        self._client = EndpointClient(settings, first_wait=first_wait)
        self.engine = self._client.name
        # Also for a policy that nobody closes: its connections live in the shared loop.
        self._closing = weakref.finalize(self, _close, self._client)

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        tools: Tools = None,
        sampling: Sampling | None = None,
        earlier: Sequence[Turn] = (),
    ) -> list[Completion]:
        """Return `n` answers, each from a separate request.

        Raises PolicyError: `context_overflow` if the endpoint reports it, else `engine_error`.
        """
        chosen = sampling or self.sampling
        _check_possible(chosen, messages)
        messages = await self._shown(messages)
        callbacks = [None] * n if tools else current_callbacks(n, self._decoder)
        works = []
        for i, callback in enumerate(callbacks):
            body = self._body(messages, tools, chosen, i)
            works.append(run_on(self._ask(body, callback, _actual(chosen, body))))
        return await all_of(works)

    def _decoder(self) -> TextDecoder:
        if self._reasoning is None:
            return "".join
        split = ReasoningStream(self._reasoning)
        return lambda characters: split("".join(characters))

    def close(self) -> None:
        """Close connections that are kept open."""
        self._closing()

    def _body(
        self, messages: Sequence[Message], tools: Tools, sampling: Sampling, number: int
    ) -> dict[str, Any]:
        return self.settings.body(
            messages=self._with_system(messages),
            chat_template_kwargs=self._kwargs or None,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed=(sampling.seed + number) % (1 << 31),
            logprobs=True,
            top_k=sampling.top_k or None,  # OpenAI's own endpoint refuses these two
            min_p=sampling.min_p or None,
            stop=list(sampling.stop) or None,
            **_others(sampling),
            tools=list(tools) if tools else None,
        )

    async def _shown(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages with data URLs in place of the ids of images."""
        if not media_ids(messages):
            return messages
        if self.media_store is None:
            raise PolicyError(
                "the messages name a row of `media`, and this endpoint's policy has no store to "
                "read it from; give it `store`, or send the image as a data URL",
                finish_reason="invalid_request",
                param="messages",
            )
        try:
            return await asyncio.to_thread(with_data_urls, self.media_store, messages)
        except NotFoundError as error:
            raise PolicyError(
                str(error), finish_reason="invalid_request", param="messages"
            ) from error

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        is_set = bool(messages) and messages[0].get("role") == "system"
        if self._system is None or is_set:
            return list(messages)
        return [{"role": "system", "content": self._system}, *messages]

    async def _ask(
        self, body: Mapping[str, Any], callback: TokenCallback | None, sampling: Sampling
    ) -> Completion:
        asked = perf_counter()
        first: list[float] = []

        def timed(text: str) -> None:
            first.append(perf_counter())
            assert callback is not None
            callback(text)

        async with shared_semaphore(self.settings.url, self.settings.max_concurrency):
            sent = perf_counter()
            try:
                answer = await self._client.complete(body, on_text=callback and timed)
            except NoAnswerError as error:
                raise PolicyError(str(error), finish_reason=error.finish_reason) from None
            now = perf_counter()
        first_token = first[0] - sent if first else 0.0
        timing = Timing(queued=sent - asked, first_token=first_token, total=now - asked)
        keeps = _gives_full(sampling, processed=self.settings.processed_logprobs)
        made = completion(
            answer,
            engine=self.engine,
            keeps_logprobs=keeps,
            timing=timing,
            reasoning_format=self._reasoning,
        )
        return replace(made, sampling=sampling)


def _check_possible(sampling: Sampling, messages: Sequence[Message]) -> None:
    if sampling.top_logprobs:
        raise PolicyError(
            "an endpoint's likeliest tokens have no token ids; leave `top_logprobs` out",
            finish_reason="invalid_request",
            param="top_logprobs",
        )
    if any(message.get("is_raw") for message in messages):
        raise PolicyError(
            "an endpoint answers conversations, not raw prompts; send `messages`",
            finish_reason="invalid_request",
            param="prompt",
        )


def _gives_full(sampling: Sampling, *, processed: bool) -> bool:
    """Return whether an endpoint's log-probs are of the full distribution at the temperature.

    Processed ones are of the truncated distribution, others of the model's own, at temperature 1.
    """
    if processed:
        return not (sampling.is_truncated or sampling.is_processed)
    # a grammar is applied to the logits before servers take log-probs of them
    is_free = sampling.json_schema is None and not sampling.forced_tools
    return is_free and sampling.temperature in (0.0, 1.0)


def _others(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of settings that are not at their defaults; some are vLLM's own."""
    made = sampling.others
    if "logit_bias" in made:
        made["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if (schema := made.pop("json_schema", None)) is not None:
        form = {"name": "answer", "schema": json.loads(schema), "strict": True}
        made["response_format"] = {"type": "json_schema", "json_schema": form}
    if names := made.pop("forced_tools", ()):
        named = {"type": "function", "function": {"name": names[0]}}
        made["tool_choice"] = named if len(names) == 1 else "required"
    return made


def _actual(sampling: Sampling, body: Mapping[str, Any]) -> Sampling:
    """Return the sampling of a request, in which `extra_body` may override the run's."""
    names = ("temperature", "top_p", "top_k", "min_p", *OTHERS)
    asked = {name: body[name] for name in names if isinstance(body.get(name), int | float)}
    if isinstance(biases := body.get("logit_bias"), Mapping):
        asked["logit_bias"] = tuple((int(token), bias) for token, bias in biases.items())
    names = ("max_tokens", "stop", "json_schema", "forced_tools")
    return replace(Sampling(**{name: getattr(sampling, name) for name in names}), **asked)


def _close(client: EndpointClient) -> None:
    shared_loop().submit(client.aclose())
