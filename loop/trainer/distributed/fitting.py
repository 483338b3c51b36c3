"""Refuse, before any weights are loaded, models that cannot be divided as a configuration says."""

from math import gcd

from transformers import PreTrainedModel

from ....store.errors import ConfigError
from ...algorithms import Algorithm
from ...config import DistributedConfig, FrozenModel, RunConfig, check_divides
from ..memory import skeleton
from .expert_parallel import DISPATCHES
from .tensor_parallel import wild


def check_models(config: RunConfig, algorithm: Algorithm) -> None:
    """Raise ConfigError for a model that its processes cannot divide, with the sizes that fit."""
    trainer, parallel = config.trainer, config.trainer.distributed
    if parallel.tensor_parallel == parallel.expert_parallel == parallel.context_parallel == 1:
        return
    if trainer.compile:
        raise ConfigError(
            "`trainer.compile` is true, and layers that `trainer.distributed.tensor_parallel`, "
            "`context_parallel` or `expert_parallel` divides are not compiled; set compile to false"
        )
    if parallel.context_parallel > 1:
        _check_context(config, algorithm)
    given = {"model": config.model, "trainer.reference": trainer.reference}
    if "vocabulary" not in algorithm.needs:  # else each process has the whole teacher
        given["trainer.teacher"] = trainer.teacher
    if trainer.critic.path is not None:
        given["trainer.critic"] = FrozenModel(path=trainer.critic.path)
    for key, one in given.items():
        if one is not None:
            model = skeleton(one)
            if parallel.expert_parallel > 1:
                _check_experts(f"`{key}`", model, parallel.expert_parallel)
            if parallel.tensor_parallel > 1:
                _check_tensor(f"`{key}`", model, parallel)
            _check_heads(f"`{key}`", model, parallel)


def _check_experts(key: str, model: PreTrainedModel, size: int) -> None:
    plan = model.ep_plan
    if DISPATCHES not in plan.values():
        lacks = "sends no tokens to experts" if plan else "has no experts with an `ep_plan`"
        raise ConfigError(
            f"{key}: `{type(model).__name__}` {lacks} in transformers, which "
            f"`trainer.distributed.expert_parallel` {size} would divide; set that to 1"
        )
    counts = {
        len(parameter)
        for name, parameter in model.named_parameters()
        if plan.get(wild(name)) == "grouped_gemm"
    }
    for count in counts:
        _divides("expert_parallel", size, count, f"experts of {key}")


def _check_tensor(key: str, model: PreTrainedModel, parallel: DistributedConfig) -> None:
    size = parallel.tensor_parallel
    if not any("*" in name for name in model.tp_plan):
        raise ConfigError(
            f"{key}: `{type(model).__name__}` has no `tp_plan` in transformers, by which "
            f"`trainer.distributed.tensor_parallel` {size} would divide it; set that to 1, since "
            "FSDP shards any model"
        )
    if model.ep_plan and parallel.expert_parallel == 1:
        # each process would have two parts of a matrix, which checkpoints cannot store
        raise ConfigError(
            f"{key}: `{type(model).__name__}` has experts, which `trainer.distributed."
            f"tensor_parallel` {size} does not divide; set `expert_parallel` to a multiple of it"
        )


def _check_heads(key: str, model: PreTrainedModel, parallel: DistributedConfig) -> None:
    text, tensor = model.config.get_text_config(), parallel.tensor_parallel
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    what = f"attention heads and {shared} key-value heads of {key}"
    # A key-value head is not copied to several processes: its gradient would have to be added up.
    _divides("tensor_parallel", tensor, gcd(heads, shared), what, given=heads)
    if tensor > 1:
        what += f" for each of tensor_parallel {tensor}"
    each = gcd(heads, shared) // tensor
    _divides("context_parallel", parallel.context_parallel, each, what, given=heads)


def _check_context(config: RunConfig, algorithm: Algorithm) -> None:
    trainer = config.trainer
    reason = None
    if algorithm.network == "reward_model":
        reason = "reward models score sequences that are not packed"
    elif algorithm.needs & {"values", "old_values"}:
        reason = "critics read sequences that are not packed"
    elif "vocabulary" in algorithm.needs:
        reason = "whole distributions are compared on sequences that are not packed"
    elif trainer.packing is False:
        reason = "`trainer.packing` is false"
    others = {"model": config.model, "trainer.reference": trainer.reference}
    for key, one in {**others, "trainer.teacher": trainer.teacher}.items():
        if one is not None and one.attention != "sdpa":
            reason = f"`{key}.attention` is {one.attention}, and only sdpa is divided"
    if reason is not None:
        raise ConfigError(
            f"`trainer.distributed.context_parallel` divides packed sequences, and {reason}; set "
            "context_parallel to 1, or change that"
        )


def _divides(name: str, size: int, whole: int, what: str, *, given: int | None = None) -> None:
    try:
        check_divides(name, size, whole, what, given=given)
    except ValueError as error:
        raise ConfigError(f"`trainer.distributed`: {error}") from error
