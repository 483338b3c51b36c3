"""Estimate the memory of a run from its configuration alone, before any weights are loaded."""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ...store.errors import ConfigError
from ..algorithms import Algorithm, resolve
from ..config import FrozenModel, LoraConfig, RunConfig
from ..models.adapter_files import base_of, is_adapter
from ..models.load import check_folder, device_of, make_tiny
from ..models.threads import weight_bytes
from .distributed.tensor_parallel import divided, narrowed
from .numerics import autocast

_log = logging.getLogger(__name__)

MOMENTS = {"sgd": 0, "adafactor": 0, "muon": 4, "adamw_8bit": 2}
"""Bytes of an optimizer's state for each trained number; others have two float32 numbers."""
VLLM_SHARE = 0.9
"""vLLM's default of `gpu_memory_utilization`."""
SMALL = 2**28
"""Bytes of a model's weights below which a run is not estimated before it begins."""


@dataclass(frozen=True)
class Part:
    """A part of a run's memory."""

    name: str
    bytes: int
    ways: tuple[str, ...] = ()
    """Keys of the configuration that make it smaller."""
    kind: Literal["certain", "estimate", "limit"] = "certain"
    """Whether all of it is allocated, about that much, or at most that much."""
    on_cpu: bool = False
    """Whether it is in CPU memory, whatever the model's device."""


@dataclass(frozen=True)
class Estimate:
    """The memory of one trainer process, its engine included."""

    parts: tuple[Part, ...]
    device: str
    available: dict[str, int]
    """Bytes that the machine has, by device."""

    def place(self, part: Part) -> str:
        """Return the device that a part is on."""
        return "cpu" if part.on_cpu else self.device

    def on(self, device: str) -> list[Part]:
        """Return the parts on a device, largest first."""
        return sorted((p for p in self.parts if self.place(p) == device), key=lambda p: -p.bytes)

    def needed(self, device: str, *, certain: bool = False) -> int:
        """Return the bytes that are needed on a device, without limits."""
        kinds = ("certain",) if certain else ("certain", "estimate")
        return sum(part.bytes for part in self.on(device) if part.kind in kinds)

    def problem(self, device: str, *, certain: bool = False) -> str | None:
        """Return why a run does not fit on a device and which keys to change, or None."""
        needed, limit = self.needed(device, certain=certain), self.available[device]
        if needed <= limit:
            return None
        parts = [part for part in self.on(device) if part.kind != "limit"]
        ways = list(dict.fromkeys(way for part in parts for way in part.ways))
        return (
            f"the run needs {'at least' if certain else 'about'} {size(needed)} on `{device}`, "
            f"which has {size(limit)}; the largest part is `{parts[0].name}`, "
            f"{size(parts[0].bytes)}; change {', '.join(ways[:5])}"
        )

    @property
    def problems(self) -> list[str]:
        """What does not fit, or may come not to, by device."""
        found = [self.problem(device) for device in self.available]
        for device, most in self.available.items():
            left = most - self.needed(device)
            found += [
                f"the {part.name} may grow to {size(part.bytes)} on `{device}`, where "
                f"{size(max(0, left))} are left; lower {', '.join(part.ways)}"
                for part in self.on(device)
                if part.kind == "limit" and part.bytes > left
            ]
        return [problem for problem in found if problem is not None]


def size(count: int) -> str:
    """Return bytes as text.

    >>> size(3 * 2**30), size(5_000_000)
    ('3.00 GiB', '4.8 MiB')
    """
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def check_memory(config: RunConfig, algorithm: Algorithm) -> None:
    """Raise ConfigError if a run certainly needs more memory than there is; warn if it may."""
    if weight_bytes(config.model) < SMALL or config.trainer.backend.tinker is not None:
        return
    found = estimate(config, algorithm)
    for device in found.available:
        if (certain := found.problem(device, certain=True)) is not None:
            raise ConfigError(certain)
        if (likely := found.problem(device)) is not None:
            _log.warning("%s", likely)


def estimate(config: RunConfig, algorithm: Algorithm | None = None) -> Estimate:
    """Return the memory of a run; ConfigError for a model whose configuration is not found.

    Activations are those of one micro-batch of full length. Left out: what torch itself, the
    store and this program take, and copies of published weights.
    """
    algorithm = algorithm or resolve(config.algorithm)
    device = device_of(config.model.device)
    parts = [*_training(config, algorithm, device)]
    if config.explorer is not None:
        parts += _engine(config)
    available = {"cpu": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    if device.type == "cuda":
        available[str(device)] = torch.cuda.get_device_properties(device).total_memory
    return Estimate(tuple(parts), str(device), available)


def _training(config: RunConfig, algorithm: Algorithm, device: torch.device) -> Iterator[Part]:
    trainer, offload = config.trainer, config.trainer.offload
    on_host = offload.parameters
    processes, tensor = trainer.distributed.world_size or 1, trainer.distributed.tensor_parallel
    shards = trainer.distributed.shard_size or processes // tensor or 1
    of_several = ("trainer.distributed.shard_size", "trainer.distributed.tensor_parallel")
    fewer = of_several if processes > 1 else ()
    model = skeleton(config.model)
    weights = numbers(model, tensor=tensor)
    trained = weights if config.model.lora is None else adapter(model, config.model.lora)
    frozen = weights + trained if config.model.lora else weights
    lora = () if config.model.lora else ("model.lora",)
    yield Part("weights in float32", 4 * frozen // shards, (*lora, *fewer), on_cpu=on_host)
    yield Part("gradients", 4 * trained // shards, (*lora, *fewer), on_cpu=on_host)
    state = trained * (MOMENTS.get(trainer.optimizer, 8) + 4 * offload.optimizer) // shards
    ways = ("trainer.offload.optimizer", "trainer.optimizer (adafactor)", *lora, *fewer)
    on_cpu = offload.optimizer or on_host
    yield Part(f"state of {trainer.optimizer}", state, ways, on_cpu=on_cpu)
    if algorithm.needs & {"values", "old_values"}:
        each = 8 + MOMENTS.get(trainer.optimizer, 8)
        yield Part("critic, trained as the policy", weights * each // shards, fewer, on_cpu=on_host)
    others = {"teacher": trainer.teacher if algorithm.needs & _TAUGHT else None}
    if "reference" in algorithm.needs and (trainer.reference or config.model.lora is None):
        others["reference"] = trainer.reference or config.model
    for name, other in others.items():
        if other is not None:
            held = weights if other is config.model else numbers(skeleton(other), tensor=tensor)
            key = "model.dtype" if other is config.model else f"trainer.{name}.dtype"
            yield Part(name, held * _bytes(other) // shards, (key, *fewer), on_cpu=on_host)
    yield from _passes(config, model, device)


_TAUGHT = frozenset({"teacher_logprobs", "vocabulary"})


def _passes(config: RunConfig, model: PreTrainedModel, device: torch.device) -> Iterator[Part]:
    trainer = config.trainer
    tokens = -(-trainer.micro_batch_tokens // trainer.distributed.context_parallel)
    kept = activations(config, model, device, tokens=tokens)
    text = model.config.get_text_config()
    layer = kept // text.num_hidden_layers
    name, ways = "activations", ("trainer.micro_batch_tokens",)
    if trainer.gradient_checkpointing:
        kept = 4 * tokens * text.hidden_size * text.num_hidden_layers
        name = "activations between layers"
    else:
        ways = ("trainer.gradient_checkpointing", *ways)
    on_cpu = trainer.offload.activations
    ways = ways if on_cpu else (*ways, "trainer.offload.activations")
    yield Part(name, kept, ways, "estimate", on_cpu=on_cpu)
    # the backward pass holds the gradients of one layer's activations
    yield Part("backward pass of a layer", layer, ways[-2:], "estimate")
    tensor = trainer.distributed.tensor_parallel
    logits = min(trainer.max_logits_bytes, 16 * tokens * text.vocab_size // tensor)
    yield Part("logits", logits, ("trainer.max_logits_bytes",), "estimate")


def _engine(config: RunConfig) -> Iterator[Part]:
    assert config.explorer is not None
    engine = config.explorer.engine
    if engine.vllm is not None and torch.cuda.is_available():
        share = engine.vllm.engine_args.get("gpu_memory_utilization", VLLM_SHARE)
        total = torch.cuda.get_device_properties(0).total_memory
        key = "explorer.engine.vllm.engine_args.gpu_memory_utilization"
        yield Part(f"vLLM, {share:.0%} of a GPU", int(share * total), (key,))
    if engine.transformers is not None:
        model, each = skeleton(config.model), _bytes(config.model)
        yield Part("engine's weights", each * numbers(model), ("model.dtype",))
        cached = engine.transformers.max_cache_tokens * _cached(model) * each
        key = "explorer.engine.transformers.max_cache_tokens"
        yield Part("KV cache", cached, (key,), "limit")


def _cached(model: PreTrainedModel) -> int:
    """Return the numbers in the KV cache for each token."""
    text: Any = model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * width


def _bytes(model: FrozenModel) -> int:
    return 4 if model.dtype == "float32" else 2


def skeleton(config: FrozenModel) -> PreTrainedModel:
    """Return a model without numbers, of its configuration alone."""
    with torch.device("meta"):
        if config.from_scratch is not None:
            return make_tiny(config.from_scratch, seed=0)[0]
        if config.path is None:
            raise ConfigError(
                "the model is of another run, which is found when this one starts; name a folder "
                "in `model.path`"
            )
        check_folder(config.path)
        folder = base_of(Path(config.path))[0] if is_adapter(config.path) else config.path
        try:
            found = AutoConfig.from_pretrained(str(folder))
            return AutoModelForCausalLM.from_config(found)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"`{config.path}` has no configuration of a language model: "
                f"{str(error).splitlines()[0]}"
            ) from error


def numbers(model: PreTrainedModel, *, tensor: int = 1) -> int:
    """Return how many numbers the parameters have; tied ones count once.

    With `tensor`, they are those of each of so many processes that divide the matrices.
    """
    names = divided(model, tensor) if tensor > 1 else frozenset()
    return sum(
        parameter.numel() // (tensor if name in names else 1)
        for name, parameter in model.named_parameters()
    )


def adapter(model: PreTrainedModel, config: LoraConfig) -> int:
    """Return how many numbers an adapter has."""
    head = model.get_output_embeddings()
    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and (config.targets is None or name.endswith(config.targets))
    ]
    return sum(config.rank * (layer.in_features + layer.out_features) for layer in found)


def activations(
    config: RunConfig, model: PreTrainedModel, device: torch.device, *, tokens: int
) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, parameters left out.

    The pass is that of the model, on tensors that have shapes but no numbers. For a model that
    chooses its layers by numbers, as some mixtures of experts, it is 0, with a warning.
    """
    kept: dict[object, int] = {}
    held: list[torch.UntypedStorage] = []

    def keep(tensor: Tensor) -> None:
        # The storage is held, because another one may get the identity of one that is freed. The
        # tensor is not: its graph refers to this function, so that neither would ever be freed.
        storage = tensor.untyped_storage()
        kept.setdefault(_identity(tensor), storage.nbytes())
        held.append(storage)

    with autocast(config.trainer, device, dtype=config.model.dtype):
        is_half = torch.is_autocast_enabled(device.type)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.device("cpu"):
        tensor = config.trainer.distributed.tensor_parallel
        shape = model.config if tensor == 1 else narrowed(model.config, tensor)
        network = AutoModelForCausalLM.from_config(shape)
        held += [parameter.untyped_storage() for parameter in network.parameters()]
        own = {_identity(parameter) for parameter in network.parameters()}
        ids = torch.zeros(1, tokens, dtype=torch.long)
        # passed on unread: transformers would build a mask of all pairs of tokens
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        passes = torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_half)
        try:
            with passes, saved_tensors_hooks(keep, lambda kept: kept):
                network.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False)
        except (RuntimeError, TypeError, ValueError) as error:
            name, reason = type(network).__name__, next(iter(str(error).splitlines()), "")
            _log.warning("the activations of `%s` are not estimated: %s", name, reason)
            return 0
    return sum(count for storage, count in kept.items() if storage not in own)


def _identity(tensor: Tensor) -> object:
    # tensors without numbers have no address in memory
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
