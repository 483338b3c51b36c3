"""The consumer of experience: what it draws, and how it steps."""

from pydantic import Field

from .draws import FifoConfig, SamplerConfig
from .section import Float, Int, OperatorSpec, Section, Share


class TrainerConfig(Section):
    """The consumer of experience."""

    steps: Int | None = Field(default=None, ge=1)
    """Optimizer steps; None (offline only): until each row was drawn `epochs` times."""
    batch_size: Int = Field(default=32, ge=1)
    """Groups a step for algorithms that work on groups, else rows."""
    where: str | None = None
    """SQL condition over `experiences`; offline it chooses the rows from the whole store."""
    source: str | None = None
    """Offline: a query that gives `experience_id`; only these rows are trained on."""
    at: str | None = None
    """Offline: a snapshot's name; the rows are those of then."""
    with_columns: tuple[str, ...] = ()
    """Side columns: `reward=score:strict@2` trains on another reward than the one stored first.

    Others, as `priority=derived:priority`, are for priorities and for credit to read.
    """
    operators: tuple[OperatorSpec, ...] = ()
    """A pipeline's chain, applied to a step's rows before the advantage.

    What a filter drops is drawn with weight 0, and its reason stands in `drops`; what sets `reward`
    shapes it.
    """
    sampler: SamplerConfig = SamplerConfig(fifo=FifoConfig())
    new_priority: str | None = None
    """SQL expression over a step's rows, such as `abs(advantage)`: their priority from then on.

    Stored in `derived` as `priority`; a sampler sees it through `with_columns: [derived:priority]`.
    """
    epochs: Int = Field(default=1, ge=1)
    """How often a row may be drawn."""
    learning_rate: Float = Field(default=1e-5, gt=0)
    warmup_steps: Int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    decay: str = Field(default="constant", pattern="^(constant|linear|cosine)$")
    """What the learning rate does after that, until the last step."""
    decay_to: Float = Field(default=0.0, ge=0, le=1)
    """Share of the learning rate that is left at the end of a decay."""
    weight_decay: Float = Field(default=0.0, ge=0)
    betas: tuple[Share, Share] = (0.9, 0.999)
    max_grad_norm: Float = Field(default=1.0, gt=0)
    micro_batch_tokens: Int = Field(default=16384, ge=1)
    """Most tokens, padding included, that go through the model at once."""
    checkpoint_every: Int = Field(default=50, ge=1)
    keep_checkpoints: Int = Field(default=2, ge=1)
    evaluate_loss_where: str | None = None
    """Rows whose loss is measured at the start, at each checkpoint and at the end.

    They are never trained on.
    """

    @property
    def trained_where(self) -> str | None:
        """SQL condition on what may be trained on: `where`, without what is only measured."""
        return self.and_where(None)

    def and_where(self, condition: str | None) -> str | None:
        """Return a condition of one source together with those on all that is trained on."""
        held_out = self.evaluate_loss_where
        others = None if held_out is None else f"NOT coalesce(({held_out}\n), false)"
        both = [c for c in (self.where, condition, others) if c is not None]
        if len(both) < 2:
            return both[0] if both else None
        return " AND ".join(f"({c}\n)" for c in both)

    @property
    def draws_once(self) -> bool:
        """Whether each row is drawn once, in the order in which it came."""
        return self.sampler.fifo is not None and self.epochs == 1
