"""Distributed training, and which checkpoints are kept."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from .base import Float, Int, Section


class DistributedConfig(Section):
    """The trainer processes, each of which trains on a share of a step's rows."""

    world_size: Int | None = Field(default=None, ge=1)
    """Number of trainer processes; None: as many as torchrun started, else 1."""
    launcher: Literal["local", "ray", "torchrun"] = "local"
    """How the other processes are started: by this command (on this machine or Ray) or torchrun."""
    shard_size: Int | None = Field(default=None, ge=1)
    """Number of processes that share one sharded copy of the weights; None: all of them.

    With `tensor_parallel` n, each process is one of `world_size` / n that shard the same n-th."""
    tensor_parallel: Int = Field(default=1, ge=1)
    """Number of processes that divide each matrix, by the model's `tp_plan`, for the same rows."""
    context_parallel: Int = Field(default=1, ge=1)
    """Number of processes that divide the packed sequences of the same rows among them."""
    expert_parallel: Int = Field(default=1, ge=1)
    """Number of processes that divide the experts of each layer, to which tokens are sent.

    A multiple of `tensor_parallel`; the model needs an `ep_plan` in transformers."""
    timeout: Float = Field(default=600.0, gt=0)
    """Longest time that a process waits for the others, in seconds."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.world_size is not None:
            self.check(self.world_size)
        return self

    def check(self, processes: int) -> None:
        """Raise ValueError unless the processes can be divided as the settings say."""
        tensor = self.tensor_parallel
        check_divides("tensor_parallel", tensor, processes, "processes (`world_size`)")
        sharing = processes // tensor
        what = "processes" if tensor == 1 else f"processes for each of tensor_parallel {tensor}"
        check_divides("shard", self.shard_size or 1, sharing, what)
        check_divides("context_parallel", self.context_parallel, sharing, what)
        experts = self.expert_parallel
        check_divides("expert_parallel", experts, processes, "processes (`world_size`)")
        if experts > 1 and experts % tensor:
            raise ValueError(
                f"expert_parallel {experts} is not a multiple of tensor_parallel {tensor}, whose "
                "processes have the same tokens; change one of them"
            )
        if experts > 1 and self.shard_size not in (None, sharing):
            raise ValueError(
                f"shard_size {self.shard_size} replicates the weights, and expert_parallel "
                f"{experts} shards them over all processes; leave out shard_size"
            )

    def meshes(self, processes: int) -> dict[str, dict[str, int]]:
        """Return the meshes of the processes: what is on each, and its sizes above 1 by name."""
        sharing = processes // self.tensor_parallel
        shard = self.shard_size or sharing
        weights = {"replicate": sharing // shard, "shard": shard, "tensor": self.tensor_parallel}
        experts = {"shard": processes // self.expert_parallel, "experts": self.expert_parallel}
        context = self.context_parallel
        rows = {"data": sharing // context, "context": context, "tensor": self.tensor_parallel}
        made = {"weights": weights} | ({"rows": rows} if context > 1 else {})
        made |= {"experts": experts} if self.expert_parallel > 1 else {}
        return {
            of: {name: size for name, size in sizes.items() if size > 1}
            for of, sizes in made.items()
        }


def check_divides(name: str, size: int, whole: int, what: str, *, given: int | None = None) -> None:
    """Raise ValueError, with the sizes that fit, unless `size` divides `whole`.

    The message names `given` in place of `whole`, where that was derived from it.
    """
    if whole % size:
        raise ValueError(
            f"{name} {size} does not divide {given or whole} {what}; expected one of "
            + ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
        )


class KeepConfig(Section):
    """Which checkpoints are kept; a single number is `last`."""

    last: Int = Field(default=2, ge=1)
    """Number of the newest checkpoints to keep."""
    every: Int | None = Field(default=None, ge=1)
    """Keep the checkpoint of every N-th step permanently."""
    highest: str | None = None
    """Keep the checkpoint with the highest value of this metric, such as `eval/accuracy`."""
    lowest: str | None = None
    """Keep the checkpoint with the lowest value of this metric, such as `eval/loss`."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.highest is not None and self.lowest is not None:
            raise ValueError("has both `highest` and `lowest`; set one of them")
        return self

    @property
    def best(self) -> str | None:
        """The metric that determines the best checkpoint."""
        return self.highest if self.highest is not None else self.lowest


def _newest(given: Any) -> Any:
    return given if isinstance(given, dict | KeepConfig) else {"last": given}


Keep = Annotated[KeepConfig, BeforeValidator(_newest)]
