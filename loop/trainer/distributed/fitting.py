"""Refuse, before any weights are loaded, models that cannot be divided as a configuration says."""

from math import gcd

from transformers import PreTrainedModel

from ....store.errors import ConfigError
from ...algorithms import Algorithm
from ...config import FrozenModel, RunConfig, check_divides
from ..memory import skeleton


def check_models(config: RunConfig, algorithm: Algorithm) -> None:
    """Raise ConfigError for a model that its processes cannot divide, with the sizes that fit."""
    trainer, parallel = config.trainer, config.trainer.distributed
    if parallel.tensor_parallel == 1:
        return
    if trainer.compile:
        raise ConfigError(
            "`trainer.compile` is true, and layers that `trainer.distributed.tensor_parallel` "
            "divides are not compiled; set one of them to its default"
        )
    given = {"model": config.model, "trainer.reference": trainer.reference}
    if "vocabulary" not in algorithm.needs:  # else each process has the whole teacher
        given["trainer.teacher"] = trainer.teacher
    if trainer.critic.path is not None:
        given["trainer.critic"] = FrozenModel(path=trainer.critic.path)
    for key, one in given.items():
        if one is not None:
            _check_tensor(f"`{key}`", skeleton(one), parallel.tensor_parallel)


def _check_tensor(key: str, model: PreTrainedModel, size: int) -> None:
    if not any("*" in name for name in model.tp_plan):
        raise ConfigError(
            f"{key}: `{type(model).__name__}` has no `tp_plan` in transformers, by which "
            f"`trainer.distributed.tensor_parallel` {size} would divide it; set that to 1, since "
            "FSDP shards any model"
        )
    if "packed_colwise" in model.tp_plan.values():
        # a process would have two parts of such a matrix, which checkpoints cannot store
        raise ConfigError(
            f"{key}: `{type(model).__name__}` has matrices of experts, which "
            f"`trainer.distributed.tensor_parallel` {size} cannot divide; set that to 1"
        )
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    what = f"attention heads and {shared} key-value heads of {key}"
    try:
        check_divides("tensor_parallel", size, gcd(heads, shared), what, given=heads)
    except ValueError as error:
        raise ConfigError(f"`trainer.distributed`: {error}") from error
