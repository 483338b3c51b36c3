"""How the rows of a step are drawn: one strategy, or several sources with shares."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from .base import Choice, Float, Int, Section


class FifoConfig(Section):
    """Oldest first."""


class UniformConfig(Section):
    """Each as likely as any other."""

    replacement: bool = False
    """Whether a unit may be drawn twice in one step."""


class PrioritizedConfig(Section):
    """Likelier the larger the priority (prioritized replay, arXiv:1511.05952)."""

    priority: str = "priority"
    """SQL expression over columns of `experiences` and `side_columns`, `age` and `times_drawn`."""
    alpha: Float = Field(default=1.0, ge=0)
    """Power of the priority; 0 is uniform."""
    beta: Float = Field(default=0.0, ge=0, le=1)
    """Power of the importance weights; 0 leaves all at 1, 1 makes up for the priorities."""
    replacement: bool = False
    """Whether a unit may be drawn twice in one step."""


class StrategyConfig(Choice):
    """One way of drawing: the one key that is given, with its parameters."""

    noun: ClassVar[str] = "sampler"

    fifo: FifoConfig | None = None
    uniform: UniformConfig | None = None
    prioritized: PrioritizedConfig | None = None


class SourceConfig(Section):
    """One source of a mixed draw: rows of the run itself, unless it says others."""

    share: Float = Field(gt=0, le=1)
    """Part of each batch; the shares of all sources add up to 1."""
    run: str | None = None
    """Rows of another run."""
    at: str | None = None
    """A snapshot's name: rows as they were then."""
    source: str | None = None
    """A query that gives `experience_id`: these rows, of whatever run."""
    where: str | None = None
    """SQL condition over `experiences`."""
    side_columns: tuple[str, ...] = ()
    """Side columns that `priority` may name, beside those of the trainer."""
    sampler: StrategyConfig = StrategyConfig(fifo=FifoConfig())
    max_uses: Int | None = Field(default=None, ge=1)
    """How often a row may be drawn; None: as often as it comes, once for the run's own rows."""
    max_lag: Int | None = Field(default=None, ge=0)
    """Oldest rows of the run itself; None takes the schedule's."""

    @property
    def is_stored(self) -> bool:
        """Whether its rows are there already: not those that the run's explorer makes."""
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
