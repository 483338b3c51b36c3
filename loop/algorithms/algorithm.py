"""What an algorithm is: a frozen dataclass with an advantage operator and a loss."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import Field
from torch import Tensor

from ...operators import Operator
from ..batch import Batch

Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
"""How losses of tokens become one number; see `aggregate`."""
Count = Annotated[int, Field(ge=1)]
"""At least one; checked where a configuration gives it."""
Positive = Annotated[float, Field(gt=0)]
"""Above zero; checked where a configuration gives it."""


@dataclass(frozen=True)
class Loss:
    """A loss to minimise, and measurements; both add up over the micro-batches of a step."""

    value: Tensor
    metrics: dict[str, Tensor]


class Algorithm(Protocol):
    """One file, one frozen dataclass; its fields are what can be configured."""

    grouped: ClassVar[bool]
    """Whether it draws whole groups: its advantage looks at all rows of a group."""
    needs_logprobs: ClassVar[bool]
    """Whether rows must carry the behaviour policy's log-probs."""

    @property
    def group_size(self) -> int:
        """Tries at each task, unless the run sets another number."""
        ...

    def advantage(self) -> Operator | None:
        """Return the operator that computes the column `advantage`, or None when there is none."""
        ...

    def loss(self, batch: Batch, logprobs_BT: Tensor) -> Loss:
        """Return the loss of a batch, given the trained policy's log-probs of its tokens."""
        ...


def aggregate(
    losses_BT: Tensor, batch: Batch, how: Aggregation, *, norm: float | None = None
) -> Tensor:
    """Make one number of the losses of tokens, as a share of the whole step's.

    token-mean: all trained tokens count the same. seq-mean-token-mean: all sequences count the
    same. seq-mean-token-sum: longer sequences count more. seq-mean-token-sum-norm: the same,
    divided by the constant `norm` (arXiv:2503.20783). Raises ValueError for another `how`.
    """
    masked_BT = losses_BT * batch.mask_BT * batch.weight_B[:, None]
    if how == "token-mean":
        return masked_BT.sum() / batch.total_tokens
    sums_B = masked_BT.sum(1)
    if how == "seq-mean-token-mean":
        return (sums_B / batch.mask_BT.sum(1).clamp(min=1)).sum() / batch.total_sequences
    if how == "seq-mean-token-sum":
        return sums_B.sum() / batch.total_sequences
    if how == "seq-mean-token-sum-norm" and norm is not None:
        return sums_B.sum() / (batch.total_sequences * norm)
    raise ValueError(f"there is no aggregation `{how}` with norm {norm}")
