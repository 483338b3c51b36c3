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
    if parallel.tensor_parallel == parallel.expert_parallel == 1:
        return
    if trainer.compile:
        raise ConfigError(
            "`trainer.compile` is true, and layers that `trainer.distributed.tensor_parallel` or "
            "`expert_parallel` divides are not compiled; set compile to false"
        )
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
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    what = f"attention heads and {shared} key-value heads of {key}"
    _divides("tensor_parallel", size, gcd(heads, shared), what, given=heads)


def _divides(name: str, size: int, whole: int, what: str, *, given: int | None = None) -> None:
    try:
        check_divides(name, size, whole, what, given=given)
    except ValueError as error:
        raise ConfigError(f"`trainer.distributed`: {error}") from error
