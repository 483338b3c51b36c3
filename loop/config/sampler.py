"""The key `trainer.sampler`: how rows are drawn, by one strategy or from several sources."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from .base import Choice, Float, Int, Section


class FifoConfig(Section):
    """Oldest first."""


class UniformConfig(Section):
    """Uniformly at random."""

    replacement: bool = False
    """Whether a unit may be drawn twice in one step."""


class PrioritizedConfig(Section):
    """In proportion to a priority (prioritized replay, arXiv:1511.05952)."""

    priority: str = "priority"
    """SQL expression over columns of `experiences` and `side_columns`, `age` and `times_drawn`."""
    alpha: Float = Field(default=1.0, ge=0)
    """Exponent of the priority; 0 draws uniformly."""
    beta: Float = Field(default=0.0, ge=0, le=1)
    """Exponent of the importance weights: 0 leaves them at 1, 1 fully corrects for the priorities.
    """
    replacement: bool = False
    """Whether a unit may be drawn twice in one step."""


class StrategyConfig(Choice):
    """A strategy: exactly one key is set, with its parameters."""

    noun: ClassVar[str] = "sampler"

    fifo: FifoConfig | None = None
    uniform: UniformConfig | None = None
    prioritized: PrioritizedConfig | None = None


class SourceConfig(Section):
    """A source of a mixed draw: rows of the run itself, or of `run`, `at` or `source`."""

    share: Float = Field(gt=0, le=1)
    """Share of each batch; the shares of all sources add up to 1."""
    run: str | None = None
    """Draw rows of this run."""
    at: str | None = None
    """Draw rows as they were at this snapshot."""
    source: str | None = None
    """A query that returns `experience_id`: draw these rows, whatever their run."""
    where: str | None = None
    """SQL condition over `experiences`."""
    side_columns: tuple[str, ...] = ()
    """Side columns that `priority` may name, in addition to those of the trainer."""
    sampler: StrategyConfig = StrategyConfig(fifo=FifoConfig())
    """How rows of this source are drawn."""
    max_uses: Int | None = Field(default=None, ge=1)
    """How often a row may be drawn; None: without limit, but once for the run's own rows."""
    max_lag: Int | None = Field(default=None, ge=0)
    """Largest lag of the run's own rows; None: the schedule's."""

    @property
    def is_stored(self) -> bool:
        """Whether its rows are stored already, and not made by the run's explorer."""
        return any(v is not None for v in (self.run, self.at, self.source))


class SamplerConfig(StrategyConfig):
    """How a step's rows are drawn."""

    mixed: dict[str, SourceConfig] | None = None
    """Named sources with shares."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.mixed is None:
            return self
        if len(self.mixed) < 2:
            raise ValueError("`mixed` needs two sources or more; name them, each with its share")
        total = sum(source.share for source in self.mixed.values())
        if abs(total - 1) > 1e-6:
            raise ValueError(
                f"the shares of `mixed` add up to {total:g}, expected 1: "
                + ", ".join(f"{name} {source.share:g}" for name, source in self.mixed.items())
            )
        return self
