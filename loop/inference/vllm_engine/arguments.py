"""How vLLM is started: its arguments, and the environment of its processes."""

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ....store.errors import ConfigError
from ...config.engines import VllmEngine as Settings
from ...config.model import FrozenModel, RopeParameters
from ...models.images import reads_images
from ...models.rope import scaled_arguments

WORKER = "rlake.loop.inference.vllm_engine.worker.Worker"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The sizes of the slot for an adapter that vLLM offers."""
CPU_CACHE_BYTES = 1 << 30
"""Size of the KV cache on a CPU, unless `engine_args` gives another."""


def check_heads(model: FrozenModel, settings: Settings) -> None:
    """Raise ConfigError if tensor parallelism does not divide the attention heads of a model.

    Of a model on the hub nothing is known before it is loaded.
    """
    size = settings.engine_args.get("tensor_parallel_size", 1)
    if model.from_scratch is not None:
        heads = model.from_scratch.heads
    else:
        file = Path(model.path or "") / "config.json"
        found = json.loads(file.read_text()) if model.path and file.is_file() else {}
        heads = found.get("text_config", found).get("num_attention_heads")
    if heads is None or (isinstance(size, int) and size > 0 and heads % size == 0):
        return
    sizes = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
    raise ConfigError(
        f"`engine_args.tensor_parallel_size` is {size}, and the model has {heads} attention heads, "
        f"of which each GPU must have the same number; set it to one of {sizes}"
    )


def check_dtype(dtype: str) -> None:
    """Raise ConfigError for a type of weights with which the GPU does not compute."""
    import torch

    if (
        dtype == "bfloat16"
        and not on_cpu()
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ConfigError(
            f"`model.dtype` is bfloat16, with which `{torch.cuda.get_device_name()}` does not "
            "compute; set it to float16 or float32"
        )


def on_cpu() -> bool:
    """Return whether vLLM runs on the CPU here."""
    import torch

    return not torch.cuda.is_available()


def arguments(
    folder: Path,
    settings: Settings,
    *,
    dtype: str,
    adapter: Mapping[str, Any] | None = None,
    rope: RopeParameters | None = None,
) -> dict[str, Any]:
    """Return vLLM's arguments; the configuration's `engine_args` take precedence.

    Log-probs are at the sampling temperature, and `logprobs.py` makes them of the full
    distribution. A model's own sampling defaults are ignored, as in the other engines.
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
    if reads_images(folder):
        made |= _for_images()
    made |= scaled_arguments(folder, rope)
    if overrides := _architecture(folder):
        made["hf_overrides"] = {**overrides, **made.get("hf_overrides", {})}
    if settings.memory_share is not None:
        made["gpu_memory_utilization"] = settings.memory_share
    if settings.sleep and not on_cpu():
        made["enable_sleep_mode"] = True
    if adapter is not None:
        made |= lora_arguments(adapter)
    if on_cpu():
        made |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
    return made | settings.engine_args


def _for_images() -> dict[str, Any]:
    """Return vLLM's arguments for images that are prepared here.

    Raises ConfigError without torchvision, which vLLM's code of these models imports.
    """
    if find_spec("torchvision") is None:
        raise ConfigError(
            "vLLM's vision-language models need torchvision, which is missing; install the one "
            "of your torch (`torchvision==0.28.*` for torch 2.13), or set `engine: transformers`"
        )
    made: dict[str, Any] = {"limit_mm_per_prompt": {"video": 0}, "mm_processor_cache_gb": 0}
    return made | ({"skip_mm_profiling": True} if on_cpu() else {})


def lora_arguments(adapter: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's arguments for an adapter with peft's settings.

    >>> lora_arguments({"r": 4, "target_modules": ["v_proj", "q_proj"]})["max_lora_rank"]
    8
    """
    rank = max([adapter["r"], *(adapter.get("rank_pattern") or {}).values()])
    targets = adapter.get("target_modules")
    # An expression, or endings: vLLM knows layers by their last names.
    named = isinstance(targets, list) and {str(one).rpartition(".")[2] for one in targets}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next((size for size in LORA_RANKS if size >= rank), rank),
        "lora_target_modules": sorted(named) if named else None,
    }


def _architecture(folder: Path) -> dict[str, Any] | None:
    """Return the class of a model whose configuration does not name it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = json.loads((folder / "config.json").read_text())
    known: Mapping[str, Any] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    name = known.get(config.get("model_type", ""))
    return None if config.get("architectures") or not name else {"architectures": [name]}


def environment(settings: Settings) -> dict[str, str]:
    """Return the variables for vLLM's processes, without those that are set already.

    On a CPU vLLM uses as many threads as torch does here, bound to no core, since a trainer may
    run at the same time; nothing is compiled, which would take longer than small models run.
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
