"""Several processes that train together, and the checkpoints that are kept."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from .base import Float, Int, Section


class DistributedConfig(Section):
    """The processes that train together, each on a share of a step's rows."""

    world_size: Int | None = Field(default=None, ge=1)
    """How many; None: those that torchrun started, else one."""
    launcher: Literal["local", "ray", "torchrun"] = "local"
    """Who starts the others: this command, on this machine or on Ray; or torchrun did already."""
    shard_size: Int | None = Field(default=None, ge=1)
    """Processes that hold the weights once, in parts; fewer than there are hold them repeatedly.

    None: all hold them once.
    """
    timeout: Float = Field(default=600.0, gt=0)
    """Longest wait of one process for the others."""

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
    """Which checkpoints are kept; a number alone is that of the newest."""

    last: Int = Field(default=2, ge=1)
    """The newest."""
    every: Int | None = Field(default=None, ge=1)
    """Those of each so many steps, for good."""
    highest: str | None = None
    """That with the highest value of a metric, such as `eval/accuracy`."""
    lowest: str | None = None
    """That with the lowest value of a metric, such as `eval/loss`."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.highest is not None and self.lowest is not None:
            raise ValueError("has both `highest` and `lowest`; one metric says which is best")
        return self

    @property
    def best(self) -> str | None:
        """The metric that says which is best."""
        return self.highest if self.highest is not None else self.lowest


def _newest(given: Any) -> Any:
    """Take a number alone as that of the newest."""
    return given if isinstance(given, dict | KeepConfig) else {"last": given}


Keep = Annotated[KeepConfig, BeforeValidator(_newest)]
