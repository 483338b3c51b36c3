"""What an algorithm is: a frozen dataclass with an advantage operator and a loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from ...operators import Operator
from .batch import Batch, Examples

Unit = Literal["row", "group", "pair"]
"""What is drawn whole."""
Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
"""How losses of tokens become one number; see `aggregate`."""
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
    """A loss to minimise, and measurements; both add up over the micro-batches of an update."""

    value: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One file, one frozen dataclass; its fields are what can be configured."""

    unit: ClassVar[Unit] = "row"
    """What is drawn: a row, a whole group since its rows are compared, or a stored preference,
    whose rows come as chosen, rejected, chosen, rejected ..."""
    network: ClassVar[Literal["policy", "reward_model"]] = "policy"
    """What is trained: a language model, or one that gives a sequence a score."""

    takes_experts: ClassVar[bool] = False
    """Whether it imitates rows whose source is `expert`, which need no advantage or log-probs."""
    likelihoods_at: ClassVar[float | None] = None
    """The temperature of likelihoods: 1 where answers are imitated or compared by them; None: that
    which each row was sampled at, for what is weighed against the log-probs of who wrote it."""
    documents: ClassVar[bool] = False
    """Whether rows are plain texts, all of whose tokens are trained on."""
    greedy_tries: ClassVar[int] = 0
    """Tries at each task that are made greedily beside the others, and not trained on."""

    group_size: Count = 1
    """Tries at each task, unless the run sets another number."""

    @property
    def grouped(self) -> bool:
        """Whether whole groups are drawn."""
        return self.unit == "group"

    @property
    def table(self) -> str:
        """The table whose rows are drawn."""
        return "preferences" if self.unit == "pair" else "experiences"

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads beyond tokens, mask and weight: see `training/batch.py`."""
        return frozenset()

    @property
    def companion_needs(self) -> frozenset[str]:
        """Columns that are measured of its companions."""
        return self.needs

    def advantage(self) -> Operator | None:
        """Return the operator that computes the column `advantage`, or None when there is none."""
        return None

    def companions(self, rows: Examples) -> Examples | None:
        """Return other sequences that are measured beside the rows, and not trained on."""
        del rows

    def prepare(self, rows: Examples, companions: Examples | None = None) -> Examples:
        """Add what depends on the step as a whole, once, before it is cut into micro-batches.

        Whatever a loss takes a mean, a maximum or an order of must be worked out here, or the
        gradient would depend on the cut.
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
        """Return what to remember for the next step, given what this one measured."""
        del metrics
        return dict(state)


def aggregate(
    losses_BT: Tensor, batch: Batch, how: Aggregation, *, norm: float | None = None
) -> Tensor:
    """Make one number of the losses of tokens, as a share of the whole update's.

    token-mean: all trained tokens count the same. seq-mean-token-mean: all sequences count the
    same. seq-mean-token-sum: longer sequences count more. seq-mean-token-sum-norm: the same,
    divided by the constant `norm` (arXiv:2503.20783). Raises ValueError for another `how`.
    """
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
    raise ValueError(f"there is no aggregation `{how}` with norm {norm}")


FURTHEST = 20.0
"""Log-ratios are cut off at so many nats, on both sides."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return log-ratios, none further from 0 than 20 nats; what is cut off has no gradient.

    An infinite ratio would make a gradient of nan also where a clip has stopped it: 0 * inf.
    """
    return log_ratio.clamp(-FURTHEST, FURTHEST)
