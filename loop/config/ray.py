"""Where the jobs of a run work, when they are more than one machine's: on Ray."""

from pydantic import Field

from .base import Float, Int, Section


class PlaceConfig(Section):
    """What one actor takes of the cluster; Ray puts it where that is free."""

    cpus: Float = Field(default=1.0, ge=0)
    gpus: Float = Field(default=0.0, ge=0)
    resources: dict[str, Float] = Field(default={})
    """Others, by the names that the nodes give them, as `{fast_disk: 1}`."""


class RayConfig(PlaceConfig):
    """Explorers on Ray; `cpus`, `gpus` and `resources` are what each of them takes.

    Left out, the run explores in its own process.
    """

    address: str = "auto"
    """Of the cluster, as `10.0.0.1:6379`; auto: the one that Ray finds, or else a local one; local:
    one of this run's own.
    """
    num_explorers: Int = Field(default=1, ge=1)
    """How many; `rlake explore CONFIG --join N` adds more while the run goes on."""
    max_concurrent_groups: Int = Field(default=16, ge=1)
    """Groups under way in one explorer; more wait."""
    max_group_bytes: Int = Field(default=64 << 20, ge=1)
    """Largest rows of a group; one that is larger becomes a row that says so."""
    max_restarts: Int = Field(default=3, ge=0)
    """How often each explorer is started again when it dies."""
    startup_timeout: Float = Field(default=300.0, gt=0)
    """Longest time until explorers are placed and their engines are ready."""
    trainer: PlaceConfig | None = None
    """What the trainer takes; None: it works in the process of the command."""
