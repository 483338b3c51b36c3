"""The policy that runs in our process on transformers: concurrent requests become one batch."""

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from ..store.errors import JobError
from ..store.ids import content_id
from ..store.records import Message
from .generation import Request, Sampled, sample
from .models import eos_id, max_length, pad_id, prompt_ids
from .policy import Completion, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TransformersPolicy:
    """A transformers model that answers many requests at once.

    Requests that are sent before the event loop comes to rest are sampled together, in the order
    they were sent. A completion depends on the weights, the prompt, the seed and its number only
    (to rounding, which depends on the batch).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        version: int = 0,
        sampling: Sampling | None = None,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.version = version
        self.sampling = sampling or Sampling()
        self._last_prompt: tuple[str, list[int]] = ("", [])
        self._waiting: list[tuple[list[Request], asyncio.Future[list[Sampled]]]] = []

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        tools: Sequence[dict[str, Any]] | None = None,
        sampling: Sampling | None = None,
    ) -> list[Completion]:
        """Return `n` answers; raises JobError when the prompt leaves no room for an answer."""
        chosen = sampling or self.sampling
        prompt = self._prompt(messages, tools)
        room = self._room(prompt)
        requests = [
            Request(prompt, min(chosen.max_tokens, room), chosen.temperature, _seed(chosen.seed, i))
            for i in range(n)
        ]
        version = self.version
        sampled = await self._submit(requests)
        return [self._completion(prompt, s, version) for s in sampled]

    def _prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> list[int]:
        """Return the prompt's tokens; the tries of one group ask the same, one after the other."""
        asked = json.dumps([list(messages), tools])
        if self._last_prompt[0] != asked:
            self._last_prompt = (asked, prompt_ids(self.tokenizer, messages, tools=tools))
        return self._last_prompt[1]

    def _room(self, prompt: Sequence[int]) -> int:
        longest = max_length(self.model)
        room = longest - len(prompt) if longest else 1 << 30
        if room < 1:
            raise JobError(f"the prompt has {len(prompt)} tokens, the model takes {longest}")
        return room

    def _submit(self, requests: list[Request]) -> "asyncio.Future[list[Sampled]]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Sampled]] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append((requests, future))
        return future

    def _flush(self) -> None:
        """Sample what is waiting, as one batch; who gave up meanwhile is not sampled for."""
        waiting = [(r, future) for r, future in self._waiting if not future.done()]
        self._waiting = []
        if not waiting:
            return
        requests = [r for batch, _ in waiting for r in batch]
        eos, pad = eos_id(self.tokenizer), pad_id(self.tokenizer)
        try:
            sampled = iter(sample(self.model, requests, eos_id=eos, pad_id=pad))
        except Exception as error:  # noqa: BLE001 - the boundary to the engine: every waiter gets the error
            for _, future in waiting:
                future.set_exception(JobError(f"sampling failed: {type(error).__name__}: {error}"))
            return
        for batch, future in waiting:
            future.set_result([next(sampled) for _ in batch])

    def _completion(self, prompt: list[int], sampled: Sampled, version: int) -> Completion:
        return Completion(
            text=self.tokenizer.decode(sampled.token_ids, skip_special_tokens=True),  # type: ignore[arg-type]
            finish_reason=sampled.finish_reason,
            prompt_ids=prompt,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            policy_version=version,
            segments=[{"policy_version": version, "num_tokens": len(sampled.token_ids)}],
        )


def _seed(seed: int, i: int) -> int:
    """Spread (seed, number of the completion) over the seeds that torch takes."""
    return int(content_id(seed, i, length=15), 16)
