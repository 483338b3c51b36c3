"""From messages to tokens and back: a policy that speaks through an engine, exact to the token."""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any

from ...store.errors import JobError
from ...store.ids import content_id
from ...store.records import Message
from ..models.load import tokenizer_digest
from ..models.tool_calls import OutsideToolCalls, assistant_message, known_format
from .cancellation import cancel_reason, on_cancel
from .chat_template import Templates
from .detokenizer import IncrementalDetokenizer, SpecialTokens
from .engine import Engine, Request, Sampled
from .policy import Completion, PolicyError, Sampling, Turn
from .scoring import that_scores
from .token_stream import TextDecoder, TokenCallback, current_callbacks

_LONG = 20_000
"""Characters of a prompt from which it is tokenized in a thread: shorter ones take milliseconds."""
_LONG_AT_ONCE = 2
_CHARACTERS = 16
"""Characters that a token may stand for, also where the vocabulary's longest token has fewer."""


class ChatPolicy:
    """A policy that answers with what an engine samples.

    What it is told was sampled `earlier` in the conversation goes into the prompt token for token,
    where the chat template writes the conversation on as it was; where the template writes earlier
    turns anew, the prompt is made anew, and whoever makes rows of the turns begins another one.
    """

    def __init__(
        self, engine: Engine, *, sampling: Sampling | None = None, tool_call_format: str = "hermes"
    ) -> None:
        """Speak through an engine, whose model writes tool calls in a format of tool_calls."""
        self.engine = engine
        self.sampling = sampling or Sampling()
        self._format = known_format(tool_call_format)
        self._templates = Templates(engine.tokenizer, tool_call_format=tool_call_format)
        self._tokenizer = tokenizer_digest(engine.tokenizer)
        self._last_prompt: tuple[str, list[int]] = ("", [])

    @property
    def version(self) -> int:
        """The version that a request sent now is answered with."""
        return self.engine.version

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        tools: Sequence[dict[str, Any]] | None = None,
        sampling: Sampling | None = None,
        earlier: Sequence[Turn] = (),
    ) -> list[Completion]:
        """Return `n` answers; who listens hears them while they are sampled.

        Raises PolicyError: `template_error`, `context_overflow`, or what the engine says.
        """
        prompt = await self._asked(messages, tools, earlier)
        heard = current_callbacks([self._says(tools) for _ in range(n)])
        chosen = sampling or self.sampling
        sampled = await self.complete(prompt, n=n, sampling=chosen, heard=heard)
        made = [self._completion(prompt, one, tools) for one in sampled]
        return [replace(one, sampling=chosen) for one in made]

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        heard: Sequence[TokenCallback | None] = (),
    ) -> list[Sampled]:
        """Sample `n` times behind a prompt of tokens; `heard` takes each one's as they come.

        Raises PolicyError with `context_overflow` when it leaves no room, with `template_error`
        when it is empty.
        """
        if not prompt:
            raise PolicyError(
                "the messages make a prompt of no token; say something in them",
                finish_reason="template_error",
            )
        chosen = sampling or self.sampling
        longest = self.engine.max_length
        room = longest - len(prompt) if longest else chosen.max_tokens
        if room < 1:
            raise PolicyError(
                f"the prompt has {len(prompt)} tokens, the model takes {longest}",
                finish_reason="context_overflow",
            )
        most = min(chosen.max_tokens, room)
        requests = [
            Request(
                prompt_ids=prompt,
                sampling=replace(chosen, max_tokens=most, seed=_seed(chosen.seed, i)),
                heard=heard[i] if heard else None,
            )
            for i in range(n)
        ]
        if (reason := cancel_reason()) is not None:
            raise PolicyError(f"the try was stopped: {reason}", finish_reason="abort")
        with on_cancel(lambda: self.engine.abort(requests)):
            return await self.engine.complete(requests)

    async def score(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, temperature: float = 1.0
    ) -> list[float]:
        """Return the log-prob of each of `token_ids` behind the prompt, in nats.

        Raises ConfigError when the engine cannot say it.
        """
        engine = that_scores(self.engine, self.engine.name)
        return await engine.score(prompt_ids, token_ids, temperature=temperature)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return what tokens say, without special ones."""
        return self.engine.tokenizer.decode(list(token_ids), skip_special_tokens=True)  # type: ignore[return-value]

    def _says(self, tools: Sequence[dict[str, Any]] | None) -> TextDecoder:
        """Return what makes an answer's content of its tokens as they come.

        With tools it ends at a special token: calls are marked with them, and texts are read with
        them in an answer that calls tools, without them in others.
        """
        speech = IncrementalDetokenizer(
            self.text,
            special=self._marks.special,
            undecided=self._marks.bytes,
            ends_at_special=bool(tools),
        )
        if not tools:
            return speech
        beside = OutsideToolCalls(self._format)
        return lambda tokens: beside(speech(tokens))

    @cached_property
    def _marks(self) -> SpecialTokens:
        return SpecialTokens(self.engine.tokenizer)

    async def _asked(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        earlier: Sequence[Turn],
    ) -> list[int]:
        """Return the prompt's tokens; nobody else waits while a long one is made."""
        said = sum(len(str(m.get("content") or "")) for m in messages)
        self._check_size(said)
        message = len(json.dumps(tools)) if tools else 0
        if said + message <= _LONG:
            return self._prompt(messages, tools, earlier)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._aside, self._prompt, messages, tools, earlier)

    def _check_size(self, characters: int) -> None:
        longest = self.engine.max_length
        if not longest or characters <= longest * _CHARACTERS:  # and so short ones look up nothing
            return
        if characters > longest * self._longest_token:
            raise PolicyError(
                f"the messages have {characters:,} characters, far more than the {longest:,} "
                "tokens that the model takes; send fewer",
                finish_reason="context_overflow",
            )

    @cached_property
    def _aside(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_LONG_AT_ONCE, thread_name_prefix="rlake-prompts")

    @cached_property
    def _longest_token(self) -> int:
        return max(_CHARACTERS, *map(len, self.engine.tokenizer.get_vocab()))

    def _prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        earlier: Sequence[Turn],
    ) -> list[int]:
        """Return the prompt's tokens; the tries of one group ask the same, one after the other."""
        try:
            if earlier:
                return self._templates.prompt(messages, tools, earlier)
            asked = json.dumps([list(messages), tools])
            last = self._last_prompt  # another thread may put another one there
            if last[0] != asked:
                last = self._last_prompt = (asked, self._templates.prompt(messages, tools, ()))
            return last[1]
        except JobError:
            raise
        except Exception as error:
            raise PolicyError(
                f"the chat template refuses the messages: {type(error).__name__}: {error}",
                finish_reason="template_error",
            ) from error

    def _completion(
        self, prompt: list[int], sampled: Sampled, tools: Sequence[dict[str, Any]] | None
    ) -> Completion:
        text = self.text(sampled.token_ids)
        first = sampled.segments[0].policy_version if sampled.segments else self.version
        return Completion(
            text=text,
            finish_reason=sampled.finish_reason,
            message=self._message(sampled.token_ids, tools) if tools else None,
            prompt_ids=prompt,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            segments=sampled.segments,
            policy_version=first,
            engine=self.engine.name,
            tokenizer=self._tokenizer,
            timing=sampled.timing,
        )

    def _message(self, token_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> Message:
        """Return an answer that may call tools: formats mark calls with special tokens, too."""
        tokenizer = self.engine.tokenizer
        kept = list(token_ids)
        if kept[-1:] == [tokenizer.eos_token_id]:
            kept.pop()
        marked = tokenizer.decode(kept, skip_special_tokens=False)
        message = assistant_message(str(marked), tools, tool_call_format=self._format)
        if message.get("tool_calls"):
            return message
        return {"role": "assistant", "content": self.text(token_ids)}


def _seed(seed: int, i: int) -> int:
    """Spread (seed, number of the completion) over the seeds that engines take."""
    return int(content_id(seed, i, length=15), 16)
