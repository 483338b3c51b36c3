"""The engine that samples at SGLang servers."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from ....store.errors import ConfigError, JobError
from ...config import FrozenModel
from ...config.engines import SglangEngine as Settings
from ...models.chat_template import set_template
from ...models.remote_weights import is_remote, not_here
from ...models.rope import scale_rope
from ...models.state_dict import weights_digest
from ...models.weights import Weights
from ..engine import Request, Sampled
from ..event_loop import BackgroundLoop, all_of
from ..incoming_weights import IncomingWeights, WeightSource
from ..policy import PolicyError
from .answers import Answer, Scores, body_of, is_ours, scores_of
from .failures import AGAIN_SECONDS, BusyError, LostError
from .fleet import Fleet, is_first
from .server import Server


@dataclass(eq=False)
class _Pending:
    """A request under way."""

    request: Request
    rid: str = ""
    """Its name at a server, another one in each attempt."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is to be answered with the tokens so far."""


class SglangEngine:
    """SGLang servers, with weights that are replaced while they run.

    For new weights a server stops between two tokens, computes the KV cache of the requests under
    way anew, and goes on with them. Its scheduler labels each token with the weights that sampled
    it. The digest of a version's tensors is computed here, before a server reads them.

    A server that was restarted has other weights than its last label said: it is given the newest
    ones again, and its requests are repeated. An adapter is merged into its base model.
    """

    name = "sglang"

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        *,
        dtype: str = "float32",
        model: FrozenModel | None = None,
    ) -> None:
        """Connect to the servers, and give them the weights of a folder.

        `model` has the chat template and whether code of the model is run. Raises ConfigError if a
        server has another model, JobError if it does not answer.
        """
        if is_remote(folder):
            raise ConfigError(not_here(folder))
        trust = model is not None and model.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust)
        if model is not None:
            set_template(tokenizer, model)
        self.tokenizer: PreTrainedTokenizerFast = tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        self._source = WeightSource(folder, dtype=dtype, merge_adapter=True)
        if model is not None and model.rope_parameters is not None:
            scaled = AutoConfig.from_pretrained(self._source.settings, trust_remote_code=trust)
            scale_rope(scaled, model.rope_parameters)
            scaled.save_pretrained(self._source.settings)
        self._fleet = Fleet(settings, self._source.start())
        self._asked: dict[int, _Pending] = {}
        self._room = asyncio.Semaphore(settings.max_requests)
        self._own = BackgroundLoop("sglang")
        try:
            where = self._source.settings
            self._own.submit(self._fleet.connect(where, dtype=dtype, trust=trust)).result()
        except BaseException:
            self._own.submit(self._fleet.close(waits=bool(self._asked))).result()
            self._own.close()
            self._source.close()
            raise
        self.max_length: int | None = self._fleet.max_length

    @property
    def version(self) -> int:
        """The version of the weights that answer a request sent now."""
        return self._fleet.served.weights.version

    @property
    def digest(self) -> str | None:
        """The digest of these weights."""
        return self._fleet.served.weights.digest

    async def complete(self, requests: Sequence[Request]) -> list[Sampled]:
        """Sample for requests, and return the answers in the same order.

        Raises PolicyError if a server refuses a request, gives an invalid answer, or is gone for
        longer than the restart timeout.
        """
        asked = [_Pending(request) for request in requests]
        self._asked |= {id(one.request): one for one in asked}
        try:
            return await self._own.run(all_of(map(self._answer, asked)))
        finally:
            for one in asked:
                del self._asked[id(one.request)]

    async def score(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, temperature: float = 1.0
    ) -> list[float]:
        """Return the log-prob of each of `token_ids` after the prompt, in nats.

        Raises ConfigError at any temperature but 1, and PolicyError as `complete` does.
        """
        if temperature != 1:
            raise ConfigError(
                f"SGLang scores given tokens at temperature 1, not {temperature:g}; sample at "
                "temperature 1, or set `engine: transformers` for the scoring model"
            )
        ids = [*prompt_ids, *token_ids]
        if self.max_length is not None and len(ids) > self.max_length:
            raise PolicyError(
                f"the servers score at most {self.max_length} tokens, got {len(ids)}; score fewer, "
                "or start them with a larger `--context-length`",
                finish_reason="context_overflow",
            )

        async def scored(server: Server) -> list[float] | None:
            found = await self._scored(server, ids, len(token_ids))
            if found.label in self._fleet.current():
                return list(found.logprobs)
            # Also what another job gave it while this one asked nothing.
            is_ours(found.label, self._fleet.labels, server.name)
            server.label = None
            return None

        found = await self._own.run(self._fleet.repeated(scored, asyncio.Event()))
        assert found is not None, "nothing ends it"
        return found

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests; they are answered with the tokens so far."""
        asked = [self._asked[id(one)] for one in requests if id(one) in self._asked]
        self._own.soon(lambda: [one.ended.set() for one in asked])

    async def swap(self, weights: Weights) -> None:
        """Replace the weights between two tokens.

        Raises JobError if they are damaged or belong to another model; the old ones stay.
        """
        # To its end, even if the caller is cancelled: half of the servers would have other weights.
        await self._own.run(self._swap(weights), to_the_end=True)

    async def close(self) -> None:
        """Answer requests under way with the tokens so far, and close the connections."""
        self.abort([one.request for one in self._asked.values()])
        await self._own.run(self._fleet.close(waits=bool(self._asked)), to_the_end=True)
        await asyncio.to_thread(self._own.close)
        self._source.close()

    async def _swap(self, weights: Weights) -> None:
        new = await asyncio.to_thread(self._source.incoming, weights)
        await asyncio.to_thread(_check_digest, new)
        await self._fleet.replace(await asyncio.to_thread(self._fleet.labeled, new))

    async def _answer(self, asked: _Pending) -> Sampled:
        answer = Answer(asked.request)
        entering = asyncio.create_task(self._room.acquire())
        try:
            if not await is_first(entering, asked.ended):
                return answer.aborted()
            return await self._sampled(asked, answer)
        finally:
            # Not to be cancelled: it has a place.
            if not entering.cancel():
                self._room.release()

    async def _sampled(self, asked: _Pending, answer: Answer) -> Sampled:
        """Sample until an answer is complete, or is to end."""

        async def attempt(server: Server) -> Sampled | None:
            epoch = server.epoch
            asked.rid = uuid4().hex
            try:
                found = await self._ask(server, asked, answer)
            except (BusyError, LostError) as error:
                if answer.is_begun:
                    raise PolicyError(str(error)) from error
                raise
            answer.read(found, server.name)
            if not answer.is_of(self._fleet.labels, server.name):
                server.label = None
            elif server.epoch == epoch and (
                not answer.needs_scores or await self._rescored(server, answer)
            ):
                return answer.sampled()
            answer.begin_anew(server.name)
            return None

        return await self._fleet.repeated(attempt, asked.ended) or answer.aborted()

    async def _ask(self, server: Server, asked: _Pending, answer: Answer) -> dict[str, Any]:
        """Send a request, and an abort until it is answered if it is to end."""
        body = body_of(asked.request, asked.rid)
        sent = asyncio.create_task(server.generate(body, on_tokens=answer.on_tokens))
        ended = asyncio.create_task(asked.ended.wait())
        try:
            await asyncio.wait([sent, ended], return_when=asyncio.FIRST_COMPLETED)
            while not sent.done():
                # Again: an abort that arrives before its request, or in a change of weights, is
                # ignored.
                with suppress(JobError):
                    await server.abort(asked.rid)
                await asyncio.wait([sent], timeout=AGAIN_SECONDS)
            return sent.result()
        finally:
            ended.cancel()
            if not sent.done():
                sent.cancel()

    async def _rescored(self, server: Server, answer: Answer) -> bool:
        """Replace log-probs of a changed distribution by those of the model, if it still has it."""
        token_ids = answer.token_ids
        if not token_ids:
            return True
        ids = [*answer.request.prompt_ids, *token_ids]
        top = answer.request.sampling.top_logprobs
        return answer.take_scores(await self._scored(server, ids, len(token_ids), top=top))

    async def _scored(
        self, server: Server, ids: Sequence[int], number: int, *, top: int = 0
    ) -> Scores:
        """Return the log-probs of the last tokens, and of the `top` most likely ones there."""
        found = await server.generate(
            {
                "input_ids": list(ids),
                "sampling_params": {"max_new_tokens": 0},
                "return_logprob": True,
                "logprob_start_len": len(ids) - number - 1,
                "top_logprobs_num": top,
            }
        )
        return scores_of(found, ids[-number:], server.name)


def _check_digest(new: IncomingWeights) -> None:
    """Raise JobError if tensors are not what was published."""
    state = new.state
    if state is None:
        assert new.file is not None, "weights are in a file or in memory"
        state = load_file(new.file)
    if new.loaded_digest is not None and (found := weights_digest(state)) != new.loaded_digest:
        raise JobError(
            f"{new.name} has digest {found}, and {new.loaded_digest} was published; restore or "
            "retrain it"
        )
