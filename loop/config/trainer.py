"""The section `trainer`: which rows are drawn, and how they are trained on."""

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ...store.errors import nearest
from .backend import BackendConfig, TorchBackend
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
"""Schedules of the learning rate."""
OPTIMIZERS = ("adamw", "adamw_8bit", "sgd", "adafactor", "muon")
"""Optimizers with a short name."""


class UpdatesConfig(Section):
    """How the rows of one step are divided into updates."""

    epochs: Int = Field(default=1, ge=1)
    """Passes over a step's rows."""
    num_minibatches: Int = Field(default=1, ge=1)
    """Updates of each pass, each with an equal share of the rows."""
    target_kl: Float | None = Field(default=None, gt=0)
    """KL divergence in nats per token after which the step ends early. It is measured to the policy
    in the denominator of the ratios: the one that wrote the rows or, with a decoupled correction,
    the one before the step."""


class LrSchedulerConfig(Section):
    """The learning rate over the steps: warm-up, then decay."""

    name: LrSchedule = "constant"
    """Schedule of the learning rate after the warm-up, until the last step.

    The later names are schedules of transformers, whose warm-up starts at exactly 0.
    """
    min_lr_ratio: Float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of a decay, as a share of the learning rate."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Parameters of a transformers schedule, such as `num_cycles`."""
    warmup_steps: Int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""


class OffloadConfig(Section):
    """What of the training is kept in CPU memory instead of on the GPU, at the cost of time."""

    optimizer: bool = False
    """The optimizer's state and its step, with a copy of the trained parameters."""
    parameters: bool = False
    """With several processes: their parts of parameters, gradients and optimizer (FSDP2)."""
    activations: bool = False
    """What the backward pass needs; with gradient checkpointing, only the inputs of layers."""


class TrainerConfig(Section):
    """The trainer, which draws stored experiences and updates the policy."""

    backend: BackendConfig = BackendConfig(torch=TorchBackend())
    """Where the policy's weights are: with torch in this process, or at a server (tinker)."""
    steps: Int | None = Field(default=None, ge=1)
    """Optimizer steps; None (offline only): until each row was drawn `max_uses` times."""
    batch_size: Int = Field(default=32, ge=1)
    """Units per step: groups for group algorithms, pairs for preference algorithms, else rows."""
    where: str | None = None
    """SQL condition over `experiences`; offline it selects rows from the whole store.

    For preference algorithms it is over `preferences`, as are `source`, priorities and
    `eval_where`.
    """
    source: str | None = None
    """Offline: a query that returns the `experience_id` (for pairs, `preference_id`) of each row to
    train on."""
    at: str | None = None
    """Offline: name of a snapshot; rows are drawn as they were then."""
    side_columns: tuple[str, ...] = ()
    """Side columns: `reward=score:strict@2` trains on a reward other than the stored one.

    Others, such as `priority=derived:priority`, can be read by priorities and advantages.
    """
    operators: tuple[OperatorSpec, ...] = ()
    """Operators applied to a step's rows before the advantage is computed.

    Rows that a filter drops get weight 0, and the reason is stored in `drops`; an operator that
    sets `reward` shapes the reward.
    """
    sampler: SamplerConfig = SamplerConfig(fifo=FifoConfig())
    """How rows are drawn from the store."""
    priority_update: str | None = None
    """SQL expression over a step's rows, such as `abs(advantage)`, that sets their new priority.

    Stored in `experience_values` as `priority`; a sampler sees it through
    `side_columns: [derived:priority]`.
    """
    max_uses: Int = Field(default=1, ge=1)
    """Most times that a row is drawn."""
    reference: FrozenModel | None = None
    """The model that KL penalties and preference losses refer to.

    None: the policy's initial weights.
    """
    teacher: FrozenModel | None = None
    """The teacher of a distillation; it must have the policy's vocabulary."""
    critic: CriticConfig = CriticConfig()
    """The value model of algorithms that use one."""
    freeze: Patterns = ()
    """Parameters of the policy whose names match are not trained, such as `embed_tokens`."""
    router_aux_loss_coef: Float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss of a mixture of experts (arXiv:2101.03961).

    It is number of experts x sum of (share of the step's tokens x mean probability) over the
    experts, averaged over the layers: `experts_per_token` if all get as many tokens. The shares are
    those before the step, which takes one more forward pass. Not part of the metric `train/loss`.
    """
    updates: UpdatesConfig = UpdatesConfig()
    """Updates made with the rows of one step."""
    missing_logprobs: Literal["refuse", "recompute"] = "refuse"
    """What to do with rows without log-probs if the algorithm needs them.

    refuse: the job fails and names one. recompute: the policy before the step computes them, as if
    it had written the row, whatever the row's age.
    """
    foreign_tokens: Literal["refuse", "retokenize", "skip"] = "refuse"
    """What to do with rows whose `tokenizer` is known and differs from the policy's.

    refuse: the job fails and names one. retokenize: their text is tokenized again, without
    log-probs, which `draws.tokenizer` records. skip: they get weight 0; `operator_errors` has the
    reason, and the metric `train/foreign_rows` the count. Rows with token IDs and no `tokenizer`
    are assumed to have the policy's.
    """
    max_nonfinite_steps: Int = Field(default=3, ge=1)
    """The job fails after this many consecutive steps whose loss or gradient is not finite."""
    learning_rate: Float = Field(default=1e-5, ge=0)
    """Peak learning rate."""
    lr_scheduler: LrSchedulerConfig = LrSchedulerConfig()
    """Warm-up and decay of the learning rate."""
    optimizer: str = "adamw"
    """adamw, adamw_8bit, sgd, adafactor, muon, or `package.module:Class` as `torch.optim:NAdam`.

    adamw_8bit is torchao's AdamW, whose state has 8 bits per number for weights of 4096 numbers or
    more: `pip install torchao`.
    """
    optimizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the optimizer's class, such as `momentum`."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """Weight decay of the optimizer."""
    weight_decay_params: Literal["all", "matrices"] = "all"
    """Which weights decay; matrices: all but norms and biases."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's coefficients of the running averages of the gradient and its square."""
    max_grad_norm: Float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    micro_batch_tokens: Int = Field(default=16384, ge=1)
    """Most tokens of one forward pass, padding included."""
    packing: bool | Literal["auto"] = "auto"
    """Whether sequences are packed without padding; auto: if the model supports it.

    With the attention sdpa, a prompt that several of them share is packed once. Otherwise sequences
    of similar length are padded to the longest of them.
    """
    max_logits_bytes: Int = Field(default=2**28, ge=1)
    """Most bytes of logits in memory at once."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of forward and backward passes; weights, losses and the optimizer use float32.

    auto: bfloat16 if `model.dtype` is, or on a GPU that supports it; else float32. With bfloat16,
    weights are rounded for each pass as engines round them.
    """
    gradient_checkpointing: bool = False
    """Whether activations are recomputed for the backward pass instead of kept in memory."""
    offload: OffloadConfig = OffloadConfig()
    """What is kept in CPU memory; it changes no numbers."""
    compile: bool = False
    """Whether the layers of policy and critic are compiled by torch.compile.

    The first passes take minutes, and a C++ compiler; checkpoints and weights keep their names.
    """
    checkpoint_every: Int = Field(default=50, ge=1)
    """Steps between two checkpoints."""
    keep_checkpoints: Keep = KeepConfig()
    """How many of the newest checkpoints are kept, or a rule.

    Example: `{last: 2, every: 100, lowest: eval/loss}`.
    """
    distributed: DistributedConfig = DistributedConfig()
    """Training in several processes."""
    eval_where: str | None = None
    """Condition on rows, or pairs, that are held out: they are never trained on.

    Their loss is evaluated at the start, at each checkpoint and at the end.
    """

    @field_validator("optimizer")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in OPTIMIZERS and not re.fullmatch(r"[\w.]+:\w+", name):
            raise ValueError(
                f"`{name}` is neither `package.module:Class` nor the name of an optimizer"
                f"{nearest(name, OPTIMIZERS)}"
            )
        return name

    @model_validator(mode="after")
    def _best_is_named_well(self) -> Self:
        best = self.keep_checkpoints.best
        if best is not None and not best.startswith(("eval/", "train/")):
            raise ValueError(
                f"`{best}` is not a metric of a trainer; name one that begins with eval/ or train/"
            )
        return self

    def and_where(self, condition: str | None) -> str | None:
        """Return the condition of a source, combined with those on all rows that are trained on."""
        held_out = self.eval_where
        others = None if held_out is None else f"NOT coalesce(({held_out}\n), false)"
        both = [c for c in (self.where, condition, others) if c is not None]
        if len(both) < 2:
            return both[0] if both else None
        # The newline ends a `--` comment in a condition.
        return " AND ".join(f"({c}\n)" for c in both)

    @property
    def draws_once(self) -> bool:
        """Whether each row is drawn once, in the order in which it was stored."""
        return self.sampler.fifo is not None and self.max_uses == 1
