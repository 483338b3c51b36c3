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
    """Number of processes that share one sharded copy of the weights; None: all of them."""
    timeout: Float = Field(default=600.0, gt=0)
    """Longest time that a process waits for the others, in seconds."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.world_size is not None:
            check_shard(self.shard_size, self.world_size)
        return self


def check_shard(shard: int | None, processes: int) -> None:
    """Raise ValueError unless the processes can be divided into groups of `shard`."""
    if shard is not None and processes % shard:
        fitting = [n for n in range(1, processes + 1) if processes % n == 0]
        raise ValueError(
            f"shard {shard} does not divide {processes} processes; expected one of "
            + ", ".join(map(str, fitting))
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
