"""The consumer of experience: what it draws, and how it steps."""

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ...store.errors import nearest
from .base import Float, Int, OperatorSpec, Section, Share
from .distributed import DistributedConfig, Keep, KeepConfig
from .model import CriticConfig, FrozenModel, Patterns
from .sampler import FifoConfig, SamplerConfig

LrSchedule = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]
"""What a learning rate does."""
OPTIMIZERS = ("adamw", "sgd", "adafactor", "muon")
"""Those that have names of their own."""


class UpdatesConfig(Section):
    """How often the weights change with the rows of one step."""

    epochs: Int = Field(default=1, ge=1)
    """Passes over a step's rows."""
    num_minibatches: Int = Field(default=1, ge=1)
    """Updates in each pass, each with as many of the rows."""
    target_kl: Float | None = Field(default=None, gt=0)
    """Nats a token from the policy that ratios are taken to: the one that wrote the rows, or with
    a decoupled correction the one before the step. The step ends with the update behind it."""


class LrSchedulerConfig(Section):
    """What the learning rate does over the steps: it warms up, then decays."""

    name: LrSchedule = "constant"
    """What it does after the warm-up, until the last step.

    The later names are schedules of transformers, which warm up from exactly 0.
    """
    min_lr_ratio: Float = Field(default=0.0, ge=0, le=1)
    """Share of the learning rate that is left at the end of a decay."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Parameters of a schedule of transformers, as `num_cycles`."""
    warmup_steps: Int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""


class TrainerConfig(Section):
    """The consumer of experience."""

    steps: Int | None = Field(default=None, ge=1)
    """Optimizer steps; None (offline only): until each row was drawn `max_uses` times."""
    batch_size: Int = Field(default=32, ge=1)
    """Groups a step for algorithms that work on groups, pairs for those of pairs, else rows."""
    where: str | None = None
    """SQL condition over `experiences`; offline it chooses the rows from the whole store.

    For algorithms of pairs it is over `preferences`, as are `source`, priorities and
    `eval_where`.
    """
    source: str | None = None
    """Offline: a query that gives `experience_id`; only these rows are trained on.

    Of pairs it gives `preference_id`.
    """
    at: str | None = None
    """Offline: a snapshot's name; the rows are those of then."""
    side_columns: tuple[str, ...] = ()
    """Side columns: `reward=score:strict@2` trains on another reward than the one stored first.

    Others, as `priority=derived:priority`, are for priorities and for credit to read.
    """
    operators: tuple[OperatorSpec, ...] = ()
    """A pipeline's chain, applied to a step's rows before the advantage.

    What a filter drops is drawn with weight 0, and its reason stands in `drops`; what sets `reward`
    shapes it.
    """
    sampler: SamplerConfig = SamplerConfig(fifo=FifoConfig())
    priority_update: str | None = None
    """SQL expression over a step's rows, such as `abs(advantage)`: their priority from then on.

    Stored in `experience_values` as `priority`; a sampler sees it through
    `side_columns: [derived:priority]`.
    """
    max_uses: Int = Field(default=1, ge=1)
    """How often a row may be drawn."""
    reference: FrozenModel | None = None
    """What the policy must not leave too far; None: what the policy starts from."""
    teacher: FrozenModel | None = None
    """The model that a distillation learns from; it has the policy's tokens."""
    critic: CriticConfig = CriticConfig()
    freeze: Patterns = ()
    """Parameters of the policy whose name matches are not trained, as `embed_tokens`."""
    updates: UpdatesConfig = UpdatesConfig()
    """What is done with the rows of a step."""
    missing_logprobs: Literal["refuse", "recompute"] = "refuse"
    """Rows whose policy's log-probs were not kept, for an algorithm that needs them.

    refuse: the job ends and names one. recompute: those of the policy before the step stand for
    them, as if it had written the row, however old that is.
    """
    foreign_tokens: Literal["refuse", "retokenize", "skip"] = "refuse"
    """Rows whose `tokenizer` is known, and is not the policy's: their tokens mean something else.

    refuse: the job ends and names one. retokenize: tokens are made anew of their text, log-probs
    are gone, and `draws.tokenizer` says so. skip: they weigh nothing; `operator_errors` says why,
    and the metric `train/foreign_rows` how many. Rows with token ids and no `tokenizer` are taken
    as the policy's.
    """
    max_nonfinite_steps: Int = Field(default=3, ge=1)
    """So many steps in a row whose loss or gradient is not finite end the job."""
    learning_rate: Float = Field(default=1e-5, ge=0)
    lr_scheduler: LrSchedulerConfig = LrSchedulerConfig()
    """Warm-up and decay of the learning rate."""
    optimizer: str = "adamw"
    """adamw, sgd, adafactor, muon, or `package.module:Class`, as `torch.optim:NAdam`."""
    optimizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the optimizer's class, as `momentum`."""
    weight_decay: Float = Field(default=0.0, ge=0)
    weight_decay_params: Literal["all", "matrices"] = "all"
    """Which weights decay; matrices: not those of norms, nor biases."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Of AdamW."""
    max_grad_norm: Float = Field(default=1.0, gt=0)
    micro_batch_tokens: Int = Field(default=16384, ge=1)
    """Most tokens, padding included, that go through the model at once."""
    packing: bool | Literal["auto"] = "auto"
    """Whether sequences lie one after another, without padding; auto: where the model can read so.

    Otherwise those of like length are padded to the longest of them.
    """
    max_logits_bytes: Int = Field(default=2**28, ge=1)
    """Most bytes of scores over the vocabulary that are held at once."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of what the networks work out; weights, losses and the optimizer have float32.

    auto: bfloat16 on a GPU that knows it, else float32.
    """
    gradient_checkpointing: bool = False
    """Whether layers' work is done again for the gradient, instead of being kept in memory."""
    checkpoint_every: Int = Field(default=50, ge=1)
    keep_checkpoints: Keep = KeepConfig()
    """How many of the newest, or a rule: `{last: 2, every: 100, lowest: eval/loss}`."""
    distributed: DistributedConfig = DistributedConfig()
    eval_where: str | None = None
    """Rows, or pairs, whose loss is measured at the start, at each checkpoint and at the end.

    They are never trained on.
    """

    @field_validator("optimizer")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in OPTIMIZERS and not re.fullmatch(r"[\w.]+:\w+", name):
            raise ValueError(
                f"`{name}` is no `package.module:Class`, and there is no optimizer of that name"
                f"{nearest(name, OPTIMIZERS)}"
            )
        return name

    @model_validator(mode="after")
    def _best_is_named_well(self) -> Self:
        best = self.keep_checkpoints.best
        if best is not None and not best.startswith(("eval/", "train/")):
            raise ValueError(
                f"`{best}` is no metric of a trainer: their names begin with eval/ or train/"
            )
        return self

    @property
    def trained_where(self) -> str | None:
        """SQL condition on what may be trained on: `where`, without what is only measured."""
        return self.and_where(None)

    def and_where(self, condition: str | None) -> str | None:
        """Return a condition of one source together with those on all that is trained on."""
        held_out = self.eval_where
        others = None if held_out is None else f"NOT coalesce(({held_out}\n), false)"
        both = [c for c in (self.where, condition, others) if c is not None]
        if len(both) < 2:
            return both[0] if both else None
        return " AND ".join(f"({c}\n)" for c in both)

    @property
    def draws_once(self) -> bool:
        """Whether each row is drawn once, in the order in which it came."""
        return self.sampler.fifo is not None and self.max_uses == 1
