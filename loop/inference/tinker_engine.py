"""The engine that samples at the server that trains the policy, through Tinker's API."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ...store.errors import ConfigError, JobError
from ..config.engines import SamplingConfig
from ..config.engines import TinkerEngine as Settings
from ..models import remote_weights
from ..models.load import eos_id
from ..models.remote_weights import RemoteWeights
from ..models.weights import Weights
from ..tinker_api.client import TinkerClient
from .engine import Request, Sampled
from .event_loop import all_of
from .policy import PROCESSING, PolicyError, Sampling, Segment, Timing

if TYPE_CHECKING:
    from tinker import SampleResponse, SamplingClient, SamplingParams
    from transformers import PreTrainedTokenizerFast

_SEEDS = 2**31
"""Seeds of the API are below this."""


@dataclass(frozen=True)
class _Served:
    """The weights that answer requests sent now, and what samples from them."""

    version: int
    digest: str
    sampler: "SamplingClient"


class TinkerEngine:
    """Samples at a server, which batches the requests that it has.

    A request is answered by the weights that it was sent to, also when they are replaced meanwhile.
    """

    name = "tinker"

    def __init__(self, folder: Path, settings: Settings | None = None) -> None:
        """Connect to the server that has the weights of a version's folder.

        Raises ConfigError for another folder, JobError if the server does not answer.
        """
        from transformers import AutoConfig, AutoTokenizer

        if not remote_weights.is_remote(folder):
            raise ConfigError(
                f"the engine tinker samples from versions of a run with `trainer.backend: tinker`, "
                f"and `{folder}` is not one; take another engine"
            )
        self._settings = settings or Settings()
        found = remote_weights.read(folder)
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        self.tokenizer: PreTrainedTokenizerFast = tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        limits: Any = AutoConfig.from_pretrained(str(folder))
        self.max_length: int | None = getattr(limits, "max_position_embeddings", None)
        seconds = self._settings.request_timeout
        self._client = TinkerClient(found.base_url, request_timeout=seconds)
        self._served: _Served | None = None
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._ended: dict[int, asyncio.Future[None]] = {}

    @property
    def version(self) -> int:
        """The version of the weights that answer a request sent now."""
        return 0 if self._served is None else self._served.version

    @property
    def digest(self) -> str | None:
        """The digest of these weights' path at the server."""
        return None if self._served is None else self._served.digest

    async def complete(self, requests: Sequence[Request]) -> list[Sampled]:
        """Sample for requests, and return the answers in the same order.

        Raises PolicyError if the server fails, takes too long, or gives an invalid answer.
        """
        if (served := self._served) is None:
            raise PolicyError("the engine has no weights yet")
        for request in requests:
            if (problem := refused_sampling(request.sampling)) is not None:
                raise PolicyError(problem)
        return await all_of(self._answer(one, served) for one in requests)

    async def score(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, temperature: float = 1.0
    ) -> list[float]:
        """Return the log-prob of each of `token_ids` after the prompt, in nats.

        Raises ConfigError at any temperature but 1.
        """
        from tinker import ModelInput

        if temperature != 1:
            raise ConfigError(
                f"servers of Tinker's API score given tokens at temperature 1, not {temperature:g}"
            )
        if (served := self._served) is None:
            raise PolicyError("the engine has no weights yet")
        whole = ModelInput.from_ints([*prompt_ids, *token_ids])
        found = await self._wait(served.sampler.compute_logprobs(whole), "score tokens")
        scores = [score for score in found[-len(token_ids) :] if score is not None]
        if len(scores) != len(token_ids):
            raise PolicyError(f"the server scored {len(scores)} of {len(token_ids)} tokens")
        return scores

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests now; what the server samples for them is not known, and dropped."""
        for request in requests:
            ended = self._ended.get(id(request))
            if ended is not None and not ended.done():
                ended.set_result(None)

    async def swap(self, weights: Weights) -> None:
        """Send requests to other weights from now on.

        Raises JobError if the folder does not say where they are; the old ones stay.
        """
        found = await asyncio.to_thread(_found, weights)
        sampler = await asyncio.to_thread(
            self._client.call,
            lambda: self._client.service.create_sampling_client(model_path=found.path),
            f"sample from `{found.path}`",
        )
        self._served = _Served(weights.version, weights.digest, sampler)

    async def close(self) -> None:
        """Drop requests under way, and end the session."""
        for ended in self._ended.values():
            if not ended.done():
                ended.set_result(None)
        await asyncio.to_thread(self._client.close)

    async def _sampled(self, request: Request, served: _Served) -> "SampleResponse":
        """Send a request when there is room for it, and return the server's answer."""
        from tinker import ModelInput

        prompt = ModelInput.from_ints(list(request.prompt_ids))
        async with self._room():
            asked = served.sampler.sample(prompt, 1, self._params(request.sampling))
            return await self._wait(asked, "sample")

    def _room(self) -> asyncio.Semaphore:
        """Return what bounds the requests of this event loop."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._settings.max_requests)
        return self._slots[1]

    async def _answer(self, request: Request, served: _Served) -> Sampled:
        began = perf_counter()
        ended = self._ended[id(request)] = asyncio.get_running_loop().create_future()
        try:
            answer = asyncio.ensure_future(self._sampled(request, served))
            await asyncio.wait([answer, ended], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()
                return Sampled(token_ids=[], logprobs=[], finish_reason="abort", segments=[])
            one = answer.result().sequences[0]
        finally:
            del self._ended[id(request)]
        token_ids, logprobs = list(one.tokens), list(one.logprobs or ())
        if len(logprobs) != len(token_ids) or not all(map(isfinite, logprobs)):
            raise PolicyError(
                f"the server gave an invalid answer: {len(token_ids)} tokens and "
                f"{len(logprobs)} log-probs"
            )
        if request.on_tokens is not None:
            request.on_tokens(token_ids)
        segment = Segment(
            policy_version=served.version, num_tokens=len(token_ids), digest=served.digest
        )
        return Sampled(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=one.stop_reason,
            segments=[segment] if token_ids else [],
            timing=Timing(total=perf_counter() - began),
        )

    async def _wait(self, future: "Future[Any]", what: str) -> Any:
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            seconds = self._settings.request_timeout
            raise PolicyError(
                f"the server `{self._client.name}` did not {what} in {seconds:g} s"
            ) from None
        except self._client.errors as error:
            raise PolicyError(self._client.explain(error, what)) from error

    def _params(self, sampling: Sampling) -> "SamplingParams":
        from tinker import SamplingParams

        end = eos_id(self.tokenizer)
        # SkyRL takes texts or tokens, not both; the end token is a text of its own there.
        texts = [*sampling.stop, str(self.tokenizer.eos_token)] if sampling.stop else None
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            seed=sampling.seed % _SEEDS,
            stop=texts or [end],
        )


def refused_sampling(sampling: Sampling | SamplingConfig) -> str | None:
    """Return which setting the API cannot do or has no log-probs of, or None."""
    if sampling.temperature not in (0, 1):
        return (
            f"`temperature` is {sampling.temperature:g}, and servers of Tinker's API return "
            "log-probs at 1; set it to 1, or to 0 for a greedy evaluation"
        )
    given, plain = dict(vars(sampling)), Sampling()
    for name in ("min_p", "ignore_eos", "top_logprobs", *PROCESSING):
        if given.get(name, default := getattr(plain, name)) != default:
            return f"`{name}` is {given[name]}, which Tinker's API does not have; leave it out"
    return None


def _found(weights: Weights) -> RemoteWeights:
    if weights.folder is None or not remote_weights.is_remote(weights.folder):
        raise JobError(
            f"version {weights.version} is not at a server of Tinker's API: `{weights.folder}`; "
            "take the engine with which its run was trained"
        )
    found = remote_weights.read(weights.folder)
    if found.digest != weights.digest:
        raise JobError(
            f"`{weights.folder}` is not what was published: it names `{found.path}`, whose digest "
            f"is not {weights.digest}; restore or retrain it"
        )
    return found
