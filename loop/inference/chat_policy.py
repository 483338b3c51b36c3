"""A policy that turns messages into tokens for an engine, and its tokens into answers."""

import asyncio
import json
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from ...store.errors import JobError
from ...store.ids import content_id
from ...store.image_parts import media_ids, parts_of
from ...store.records import Message
from ..models.images import Images
from ..models.load import text_ids, tokenizer_digest
from ..models.reasoning import known_reasoning
from ..models.tool_calls import known_format
from .answers import AnswerReader
from .cancellation import cancel_reason, on_cancel
from .chat_template import Templates
from .detokenizer import SpecialTokens
from .engine import Engine, Request, Sampled
from .grammars import grammar_of
from .messages import is_begun
from .policy import Completion, PolicyError, Sampling, Tools, Turn
from .scoring import scorer
from .token_stream import TokenCallback, current_callbacks

_LONG = 20_000
"""Characters from which a prompt is tokenized in a thread; shorter ones take milliseconds."""
_THREADS = 2
_CHARACTERS = 16
"""Characters that a token may stand for, even if the vocabulary's longest token has fewer."""


class ChatPolicy:
    """A policy that answers with what an engine samples.

    Tokens of `earlier` turns go into the prompt unchanged if the chat template continues the
    conversation as it was. If the template rewrites earlier turns, the prompt is tokenized anew,
    and its turn begins another row.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        sampling: Sampling | None = None,
        tool_call_format: str = "hermes",
        reasoning_format: str | None = None,
        images: Images | None = None,
    ) -> None:
        self.engine = engine
        self.sampling = sampling or Sampling()
        self._format = known_format(tool_call_format)
        self._reasoning = known_reasoning(reasoning_format)
        self._images = images
        self._templates = Templates(
            engine.tokenizer,
            tool_call_format=tool_call_format,
            reasoning_format=reasoning_format,
            images=images,
        )
        self.media_store = None if images is None else images.store
        """The store of the images that messages may show; None: the model reads none."""
        self._tokenizer = tokenizer_digest(engine.tokenizer)
        self._last_prompt: tuple[str, list[int]] = ("", [])

    @property
    def version(self) -> int:
        """The version of the weights that would answer a request sent now."""
        return self.engine.version

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        tools: Tools = None,
        sampling: Sampling | None = None,
        earlier: Sequence[Turn] = (),
    ) -> list[Completion]:
        """Return `n` answers, which are streamed while they are sampled.

        Raises PolicyError: `template_error`, `context_overflow`, or the engine's.
        """
        chosen = sampling or self.sampling
        media = self._media(messages, chosen)
        prompt = _cut(await self._tokenized(messages, tools, earlier), chosen)
        reads = self._answers(messages, prompt, tools)
        callbacks = current_callbacks(n, reads.decoder)
        grammar = grammar_of(chosen, tools, tool_call_format=self._format)
        asked = [(chosen, i) for i in range(n)]
        sampled = await self._sent(self._requests(prompt, asked, callbacks, grammar, media))
        return [self._completion(prompt, one, reads, chosen) for one in sampled]

    def answers(
        self, messages: Sequence[Message], sampling: Sequence[Sampling]
    ) -> list[Coroutine[Any, Any, Completion]] | None:
        """Return the answer to the messages for each of several settings, to be awaited.

        Each is sampled once it is awaited, and is what `generate` returns for these settings, which
        may differ in seed and temperature only. None: the prompt is too long to tokenize it at
        once. Raises what is wrong with all of them.
        """
        if _characters(messages) > _LONG:
            return None
        chosen = sampling[0]
        media = self._media(messages, chosen)
        self._check_size(_characters(messages))
        prompt = _cut(self._prompt(messages, None, ()), chosen)
        grammar = grammar_of(chosen, None, tool_call_format=self._format)
        requests = self._requests(prompt, [(one, 0) for one in sampling], (), grammar, media)
        reads = self._answers(messages, prompt, None)
        return [self._answer(*each, reads) for each in zip(requests, sampling, strict=True)]

    async def _answer(self, request: Request, how: Sampling, reads: AnswerReader) -> Completion:
        [sampled] = await self._sent([request])
        return self._completion(request.prompt_ids, sampled, reads, how)

    def _answers(
        self, messages: Sequence[Message], prompt: Sequence[int], tools: Tools
    ) -> AnswerReader:
        # what continues a begun answer, or a raw prompt, is text
        is_chat = not is_begun(messages) and not (messages and messages[-1].get("is_raw"))
        return AnswerReader(
            self.engine.tokenizer,
            self._special,
            tools=tools,
            tool_call_format=self._format,
            reasoning_format=self._reasoning if is_chat else None,
            prompt=prompt,
        )

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        callbacks: Sequence[TokenCallback | None] = (),
        grammar: str | None = None,
        media: Sequence[str] = (),
    ) -> list[Sampled]:
        """Sample `n` times after a prompt of tokens; each callback receives one answer's tokens.

        `grammar` is that of `grammars.grammar_of`; `media` are the images that the prompt shows.

        Raises PolicyError: `context_overflow` if the prompt leaves no room, `template_error` if it
        is empty.
        """
        chosen = sampling or self.sampling
        asked = [(chosen, i) for i in range(n)]
        return await self._sent(self._requests(prompt, asked, callbacks, grammar, media))

    def _requests(
        self,
        prompt: Sequence[int],
        asked: Sequence[tuple[Sampling, int]],
        callbacks: Sequence[TokenCallback | None],
        grammar: str | None,
        media: Sequence[str],
    ) -> list[Request]:
        """Return the requests for settings and indices of completions."""
        if not prompt:
            raise PolicyError(
                "the messages make a prompt of no token; say something in them",
                finish_reason="template_error",
            )
        chosen, _ = asked[0]
        longest = self.engine.max_length
        room = longest - len(prompt) if longest else chosen.max_tokens
        if room < 1:
            raise PolicyError(
                f"the prompt has {len(prompt)} tokens, the model takes {longest}",
                finish_reason="context_overflow",
            )
        self._check_biases(chosen)
        most = min(chosen.max_tokens, room)
        least = min(chosen.min_tokens, most)
        return [
            Request(
                prompt_ids=prompt,
                sampling=how.updated(max_tokens=most, min_tokens=least, seed=_seed(how.seed, i)),
                grammar=grammar,
                media=media,
                on_tokens=callback,
            )
            for (how, i), callback in zip(asked, callbacks or [None] * len(asked), strict=True)
        ]

    async def _sent(self, requests: Sequence[Request]) -> list[Sampled]:
        # Before sending: `abort` ends only requests that the engine has.
        if (reason := cancel_reason()) is not None:
            raise PolicyError(f"the rollout was cancelled: {reason}", finish_reason="abort")
        with on_cancel(lambda: self.engine.abort(requests)):
            return await self.engine.complete(requests)

    async def score(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, temperature: float = 1.0
    ) -> list[float]:
        """Return the log-prob of each of `token_ids` after the prompt, in nats.

        Raises ConfigError if the engine cannot score.
        """
        engine = scorer(self.engine, self.engine.name)
        return await engine.score(prompt_ids, token_ids, temperature=temperature)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self.engine.tokenizer.decode(list(token_ids), skip_special_tokens=True)  # type: ignore[return-value]

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(self.engine.tokenizer)

    async def _tokenized(
        self, messages: Sequence[Message], tools: Tools, earlier: Sequence[Turn]
    ) -> list[int]:
        """Return the prompt's tokens; a long prompt does not block the event loop."""
        size = _characters(messages)
        self._check_size(size)
        if size + (len(json.dumps(tools)) if tools else 0) <= _LONG:
            return self._prompt(messages, tools, earlier)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._prompt, messages, tools, earlier)

    def _media(self, messages: Sequence[Message], sampling: Sampling) -> list[str]:
        """Return the images that messages show; raise PolicyError if they cannot be shown."""
        media = media_ids(messages)
        if len(media) < sum(1 for _ in parts_of(messages)):
            reason = "an image of the messages names no row of `media`; store it, and name its id"
        elif media and self._images is None:
            reason = (
                f"the messages show an image, and this model on the engine {self.engine.name} "
                "reads none; take a vision-language model, and `engine: transformers` or `vllm`"
            )
        elif media and sampling.truncate_prompt_tokens is not None:
            reason = "a prompt with an image cannot be cut; leave `truncate_prompt_tokens` out"
        else:
            return media
        raise PolicyError(reason, finish_reason="invalid_request", param="messages")

    def _check_size(self, characters: int) -> None:
        longest = self.engine.max_length
        # the first comparison spares short prompts the look at the vocabulary
        if (
            longest
            and characters > longest * _CHARACTERS
            and characters > longest * self._longest_token
        ):
            raise PolicyError(
                f"the messages have {characters:,} characters, far more than the {longest:,} "
                "tokens that the model takes; send fewer",
                finish_reason="context_overflow",
            )

    def _check_biases(self, sampling: Sampling) -> None:
        size = len(self.engine.tokenizer) if sampling.logit_bias else 0
        for token, _ in sampling.logit_bias:
            if not 0 <= token < size:
                raise PolicyError(
                    f"`logit_bias` names the token {token}, and the vocabulary has {size:,} tokens "
                    "from 0; leave it out",
                    finish_reason="invalid_request",
                    param="logit_bias",
                )

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, thread_name_prefix="rlake-prompts")

    @cached_property
    def _longest_token(self) -> int:
        return max(_CHARACTERS, *map(len, self.engine.tokenizer.get_vocab()))

    def _prompt(
        self, messages: Sequence[Message], tools: Tools, earlier: Sequence[Turn]
    ) -> list[int]:
        """Return the prompt's tokens; the last one is cached, since a group shares its prompt."""
        if messages and messages[-1].get("is_raw"):
            return self._raw(messages[-1])
        try:
            # Not cached: these tokens depend on turns that are this rollout's own.
            if earlier:
                return self._templates.prompt(messages, tools, earlier)
            key = json.dumps([list(messages), tools])
            last = self._last_prompt  # read once: another thread may replace it
            if last[0] != key:
                last = self._last_prompt = (key, self._templates.prompt(messages, tools, ()))
            return last[1]
        # Our own errors say what is wrong already.
        except JobError:
            raise
        except Exception as error:
            raise PolicyError(
                f"the chat template refuses the messages: {type(error).__name__}: {error}",
                finish_reason="template_error",
            ) from error

    def _raw(self, message: Message) -> list[int]:
        """Return the tokens of a prompt without a chat template: as given, or of its text."""
        ids = message.get("token_ids")
        if ids is None:
            return text_ids(self.engine.tokenizer, str(message["content"]))
        size = len(self.engine.tokenizer)
        if (most := max(ids, default=0)) >= size:
            raise PolicyError(
                f"the prompt has the token {most}, and the vocabulary has {size:,} from 0",
                finish_reason="invalid_request",
                param="prompt",
            )
        return list(ids)

    def _completion(
        self, prompt: Sequence[int], sampled: Sampled, reads: AnswerReader, sampling: Sampling
    ) -> Completion:
        first = sampled.segments[0].policy_version if sampled.segments else self.version
        return Completion(
            text=self.text(sampled.token_ids),
            finish_reason=sampled.finish_reason,
            message=reads.message(sampled.token_ids),
            prompt_ids=prompt,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            top_logprobs=sampled.top_logprobs,
            routed_experts=sampled.routed_experts,
            sampling=sampling,
            segments=sampled.segments,
            policy_version=first,
            engine=self.engine.name,
            tokenizer=self._tokenizer,
            timing=sampled.timing,
        )


def _characters(messages: Sequence[Message]) -> int:
    return sum(len(str(m.get("content") or "")) for m in messages)


def _cut(prompt: list[int], sampling: Sampling) -> list[int]:
    most = sampling.truncate_prompt_tokens
    return prompt if most is None else prompt[-most:]


def _seed(seed: int, i: int) -> int:
    """Spread (seed, index of the completion) over the seeds that engines accept."""
    # Hashed, not added up: (1, 0) and (0, 1) must not sample the same.
    return int(content_id(seed, i, length=15), 16)
