"""The base class of algorithms: a frozen dataclass with an advantage operator and a loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from ...operators import Operator, above_greedy
from .batch import Batch, Examples

Unit = Literal["row", "group", "pair"]
"""What one draw takes."""
Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
"""How losses of tokens are reduced to one number; see `aggregate`."""
Count = Annotated[int, Field(ge=1)]
"""At least one; checked where a configuration gives it."""
Positive = Annotated[float, Field(gt=0)]
"""Above zero; checked where a configuration gives it."""
NonNegative = Annotated[float, Field(ge=0)]
"""Zero or more; checked where a configuration gives it."""
Share = Annotated[float, Field(ge=0, le=1)]
"""From 0 to 1; checked where a configuration gives it."""


@dataclass(frozen=True)
class Loss:
    """A loss to minimize, and metrics; both are summed over the micro-batches of an update."""

    value: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm is one file with one frozen dataclass, whose fields are its parameters."""

    unit: ClassVar[Unit] = "row"
    """What one draw takes: a row, a whole group, whose rows are compared, or a stored preference,
    whose rows come as chosen, rejected, chosen, rejected ..."""
    network: ClassVar[Literal["policy", "reward_model"]] = "policy"
    """The trained network: a language model, or one that scores sequences."""

    takes_experts: ClassVar[bool] = False
    """Whether it imitates rows whose source is `expert`, which need no advantage or log-probs."""
    likelihoods_at: ClassVar[float | None] = None
    """The temperature of likelihoods: 1 for imitation and preferences; None: the one at which each
    row was sampled, for ratios to the log-probs of the policy that sampled it."""
    documents: ClassVar[bool] = False
    """Whether rows are plain texts whose tokens are all trained on."""
    group_size: Count = 1
    """Rollouts of each task, unless the run sets another number."""

    @property
    def grouped(self) -> bool:
        """Whether whole groups are drawn."""
        return self.unit == "group"

    @property
    def greedy_rollouts(self) -> int:
        """Additional rollouts of each task, sampled greedily and not trained on."""
        credit = self.advantage()
        return int(credit is not None and credit.name == above_greedy.name)

    @property
    def table(self) -> str:
        """The table that is drawn from."""
        return "preferences" if self.unit == "pair" else "experiences"

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads besides tokens, mask and weight: see `losses/batch.py`."""
        return frozenset()

    @property
    def companion_needs(self) -> frozenset[str]:
        """Columns of `MEASURED` that it reads of its companions."""
        return self.needs

    def advantage(self) -> Operator | None:
        """Return the operator that computes the column `advantage`, or None."""
        return None

    def companions(self, rows: Examples) -> Examples | None:
        """Return additional sequences that are scored with the rows but not trained on."""
        del rows

    def prepare(self, rows: Examples, companions: Examples | None = None) -> Examples:
        """Add columns that depend on the whole step, before it is divided into micro-batches.

        Means, maxima and orders over rows must be computed here, or the gradient would depend on
        how the step is divided.
        """
        del companions
        return rows

    def loss(self, batch: Batch, logprobs_BT: Tensor) -> Loss:
        """Return the loss of a batch, given the trained policy's log-probs of its tokens."""
        raise NotImplementedError(f"`{type(self).__name__}` has no loss")

    def over_vocabulary(self, logprobs_MV: Tensor, teacher_MV: Tensor) -> Tensor | None:
        """Return a number [M] for each pair of whole distributions: the column `vocabulary`.

        Called for M tokens at a time when `needs` names it, with the trained policy's and the
        teacher's log-probs of all V tokens.
        """
        del logprobs_MV, teacher_MV

    def adapt(self, state: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the state for the next step, given this one's metrics."""
        del metrics
        return dict(state)


def aggregate(
    losses_BT: Tensor, batch: Batch, how: Aggregation, *, norm: float | None = None
) -> Tensor:
    """Reduce the losses of tokens to one number, this batch's share of the whole update's loss.

    token-mean: all trained tokens count the same. seq-mean-token-mean: all sequences count the
    same. seq-mean-token-sum: longer sequences count more. seq-mean-token-sum-norm: the same,
    divided by the constant `norm` (arXiv:2503.20783). Raises ValueError for another `how`.
    """
    # Divided by totals of the update, not of the batch: the sum over micro-batches is then the same
    # however the update is divided.
    masked_BT = losses_BT * batch.mask_BT * batch.weight_B[:, None]
    if how == "token-mean":
        return masked_BT.sum() / batch.totals.tokens
    sums_B = masked_BT.sum(1)
    if how == "seq-mean-token-mean":
        return (sums_B / batch.lengths_B.clamp(min=1)).sum() / batch.totals.sequences
    if how == "seq-mean-token-sum":
        return sums_B.sum() / batch.totals.sequences
    if how == "seq-mean-token-sum-norm" and norm is not None:
        return sums_B.sum() / (batch.totals.sequences * norm)
    raise ValueError(f"aggregation `{how}` with norm {norm} does not exist")


FURTHEST = 20.0
"""Largest absolute log-ratio, in nats."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp log-ratios to 20 nats on both sides; clamped ones have no gradient.

    An infinite ratio would make the gradient NaN even where a clip has set it to 0: 0 * inf.
    """
    return log_ratio.clamp(-FURTHEST, FURTHEST)
