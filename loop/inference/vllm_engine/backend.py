"""What vLLM is asked for, whether it runs in this process or in a server of its own."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from ....store.errors import JobError
from ...config.engines import VllmEngine as Settings
from ..engine import Request
from ..policy import Sampling
from ..token_stream import TokenCallback

WORKER = "rlake.loop.inference.vllm_engine.worker.Worker"
CPU_CACHE_BYTES = 1 << 30
"""Keys and values that are held on a CPU, if nothing else is said."""


class DiedError(JobError):
    """vLLM is gone, or in a state that nobody knows."""


@dataclass(eq=False)
class PendingRequest:
    """A request under way; vLLM sees it once, and again after each change of weights."""

    request: Request
    is_ended: bool = False
    """Whether it is to be answered with what it has."""
    heard: TokenCallback | None = None
    """Takes the tokens that are sampled next, as they come; None: nobody waits for them."""
    name: str = field(default_factory=lambda: uuid4().hex)

    def tell(self, token_ids: Sequence[int]) -> None:
        """Tell whoever waits for them the next tokens."""
        if token_ids and self.heard is not None:
            self.heard(token_ids)


@dataclass(frozen=True)
class PartialOutput:
    """What was sampled for a request until it ended, or the weights changed."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    """stop, length or abort."""
    spans: Sequence[tuple[str, int]]
    """Which weights sampled how many of the tokens, as vLLM's scheduler labels each step."""
    first_token: float
    """When the first token came, as perf_counter says it."""


class Serving(Protocol):
    """A vLLM that runs. All methods raise DiedError when it does so no longer."""

    max_length: int
    """Most tokens of prompt and answer together."""

    async def start(self, folder: Path) -> None:
        """Start with the model of a folder; raises JobError when it does not start in time."""
        ...

    async def sample(
        self, asked: PendingRequest, prompt_ids: Sequence[int], sampling: Sampling
    ) -> PartialOutput:
        """Sample behind a prompt, until the end or until it is aborted."""
        ...

    async def score(self, name: str, token_ids: Sequence[int]) -> list[float] | None:
        """Return the log-prob of each token but the first; None when it was aborted."""
        ...

    async def abort(self, asked: Sequence[PendingRequest]) -> None:
        """End requests: `sample` returns what they have."""
        ...

    async def pause(self) -> None:
        """End all requests, forget all keys and values, and begin no other."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def call(self, method: str, *arguments: str) -> list[Any]:
        """Call a method of vllm_worker in each worker, and return what they say."""
        ...

    async def label(self, label: str) -> None:
        """Label the tokens that are sampled from now on."""
        ...

    async def stop(self) -> None:
        """End it, with all its processes."""
        ...


def on_cpu() -> bool:
    """Tell whether vLLM runs on the CPU here."""
    import torch

    return not torch.cuda.is_available()


def arguments(folder: Path, settings: Settings, *, dtype: str) -> dict[str, Any]:
    """Return vLLM's own arguments; what the configuration's `options` say goes first.

    Log-probs are at the sampling temperature, and by `vllm_sampling` of the full distribution;
    sampling defaults that come with a model are left out, as with our other engines.
    """
    made: dict[str, Any] = {
        "model": str(folder),
        "runner": "generate",
        "dtype": dtype,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": WORKER,
        "disable_log_stats": True,
    }
    if overrides := _architecture(folder):
        made["hf_overrides"] = overrides
    if on_cpu():
        made |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
    return made | settings.engine_args


def _architecture(folder: Path) -> dict[str, Any] | None:
    """Name the model's class where its configuration does not."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = json.loads((folder / "config.json").read_text())
    known: Mapping[str, Any] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    name = known.get(config.get("model_type", ""))
    return None if config.get("architectures") or not name else {"architectures": [name]}


def environment(settings: Settings) -> dict[str, str]:
    """Return the variables that vLLM's processes are started with, where nobody set them.

    On CPUs its threads are as many as torch's here, bound to no core, since a trainer may work
    beside them; and nothing is compiled, which would take longer than small models run.
    """
    import torch

    ours = {
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(settings.startup_timeout))),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    if on_cpu():
        ours |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            "TORCH_COMPILE_DISABLE": "1",
        }
    return {name: value for name, value in ours.items() if name not in os.environ}


def scoring_params() -> dict[str, Any]:
    """Say in vLLM's words that a prompt's tokens are scored; it samples one more in any case."""
    return {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}


def sampling_params(sampling: Sampling, *, is_heard: bool) -> dict[str, Any]:
    """Return a way of sampling in vLLM's words.

    If nobody hears the tokens as they come, only the first and the last ones are streamed.
    """
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "detokenize": bool(sampling.stop),
        "logprobs": 0,
        "stream_interval": 1 if is_heard else 1 << 20,
    }
