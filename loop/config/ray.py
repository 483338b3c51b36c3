"""The section `ray`: explorers and the trainer on a Ray cluster."""

from typing import Literal, Self

from pydantic import Field, model_validator

from .base import Float, Int, Section


class PlaceConfig(Section):
    """Resources of one actor; Ray places it where they are free."""

    cpus: Float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves."""
    gpus: Float = Field(default=0.0, ge=0)
    """GPUs that Ray reserves."""
    resources: dict[str, Float] = Field(default={})
    """Custom resources, by the names that the nodes declare, such as `{fast_disk: 1}`."""


class RayConfig(PlaceConfig):
    """Explorers on Ray; `cpus`, `gpus` and `resources` are those of each explorer.

    Without this section, the run explores in its own process.
    """

    address: str = "auto"
    """Address of the cluster, such as `10.0.0.1:6379`.

    Auto: the cluster that Ray finds, or else a local one; local: a local one for this run.
    """
    num_explorers: Int = Field(default=1, ge=1)
    """Number of explorers; `rlake explore CONFIG --add-explorers N` adds more during the run."""
    max_explorers: Int | None = None
    """Most explorers; with it, explorers are added while the trainer waits for rows, and ended
    while they are ahead as far as they may be; at least `num_explorers` stay. None: no change."""
    scale_interval: Float = Field(default=30.0, gt=0)
    """Time over which this is watched before one explorer is added or ended, in seconds."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "SPREAD"
    """How Ray places the explorers and a placed trainer, as one placement group, all or none.

    Spread: on different nodes, as far as there are; pack: on few nodes; strict: or not at all.
    """
    max_concurrent_groups: Int = Field(default=16, ge=1)
    """Most groups that one explorer runs concurrently; others wait."""
    max_group_bytes: Int = Field(default=64 << 20, ge=1)
    """Largest size of a group's rows, in bytes; a larger group becomes one row with an error."""
    max_restarts: Int = Field(default=3, ge=0)
    """Restarts of each explorer that dies, and of a placed trainer, which continues from its newest
    checkpoint; they go to other nodes if their own are lost."""
    startup_timeout: Float = Field(default=300.0, gt=0)
    """Longest time until the run is placed, and again until engines are ready, in seconds."""
    trainer: PlaceConfig | None = None
    """Resources of the trainer; None: it runs in the command's process.

    With `trainer.distributed.launcher` ray, each of the trainer's processes has them.
    """

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max_explorers is not None and self.max_explorers < self.num_explorers:
            raise ValueError(
                f"max_explorers {self.max_explorers} is less than num_explorers "
                f"{self.num_explorers}, which is the least; raise it, or lower the other"
            )
        return self
