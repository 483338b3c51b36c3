"""A policy gradient of named parts: a loss, an advantage, a penalty and an aggregation.

`loss` names how a token is trained on and `advantage` the operator that says how much, each with
its parameters; the others are parameters of every policy gradient. So a loss meets any advantage,
also one of steps, as `gigpo`. Most algorithms here are such combinations with names:

    grpo      {loss: clipped, advantage: group_zscore, aggregation: seq-mean-token-mean}
    dapo      {loss: {clipped: {clip_high: 0.28}}, advantage: group_zscore, group_size: 16}
    dr_grpo   {loss: clipped, advantage: group_centered, aggregation: seq-mean-token-sum}
    rloo      {loss: log_likelihood, advantage: leave_one_out, aggregation: seq-mean-token-sum}
    gspo      {loss: sequence_clipped, advantage: group_zscore, aggregation: seq-mean-token-mean}
    cispo     {loss: clipped_weight, advantage: group_zscore}
    sapo      {loss: soft_gate, advantage: group_zscore, aggregation: seq-mean-token-mean}
    sppo      {loss: clipped_log_ratio, advantage: group_centered}
    m2po      {loss: second_moment, advantage: group_zscore}
    asymre    {loss: log_likelihood, advantage: {group_centered: {shift: -0.1}}, ...}

Groups are left out by operators: `explorer.operators: [drop_flat_groups]`. Assumes what the loss
and the advantage assume; a loss of `log_likelihood` has no ratio, so older rows need a
`correction`.

Metrics: those of the algorithm that the loss is of; with `clipped`, `train/clip_fraction` is the
share of tokens whose ratio left the trusted range on the side where that stops the gradient.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated

from torch import Tensor

from ...operators.parameters import Key, keys_of
from ...operators.resolve import taken_apart
from ...store.errors import ConfigError, nearest
from ..losses import Credit, NamedPart, PolicyGradient, Unclipped
from ..losses.batch import Batch, Examples
from . import build
from .cispo import CISPO
from .clip_b import ClipB
from .clip_v import ClipV
from .grpo import GRPO
from .gspo import GSPO
from .m2po import M2PO
from .opmd import OPMD
from .rec import REC
from .sapo import SAPO
from .sppo import SPPO
from .topr import TOPR

LOSSES: dict[str, type[PolicyGradient]] = {
    "clipped": GRPO,
    "clipped_log_ratio": SPPO,
    "clipped_weight": CISPO,
    "damped": OPMD,
    "entropy_mask": ClipB,
    "exact_entropy_mask": ClipV,
    "log_likelihood": Unclipped,
    "masked": REC,
    "second_moment": M2PO,
    "sequence_clipped": GSPO,
    "soft_gate": SAPO,
    "tapered": TOPR,
}
"""The losses of tokens, by the algorithms that brought them."""
_OF_ADVANTAGES = frozenset({"baseline", "drop", "normalize"})
"""Parameters of those algorithms that only determine their own advantages."""


@dataclass(frozen=True, kw_only=True)
class Parts(PolicyGradient):
    """Policy gradient with a loss and an advantage that are named."""

    objective: Annotated[NamedPart, Key("loss")] = "clipped"
    """The loss of tokens, with its own parameters: `clipped`, `sequence_clipped`, `clipped_weight`,
    `soft_gate`, `clipped_log_ratio`, `log_likelihood`, `tapered`, `masked`, `damped`,
    `second_moment`, `entropy_mask` or `exact_entropy_mask`."""
    credit: Credit = "group_zscore"
    """The operator that computes advantages."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a part that does not exist, or parameters that do not fit."""
        super().__post_init__()
        self.part  # noqa: B018 - raises now, and not in the first step

    @cached_property
    def part(self) -> PolicyGradient:
        """The algorithm that the loss is of, with the other parts of this one."""
        name, params = taken_apart(self.objective, "a loss", error=ConfigError)
        if name not in LOSSES:
            raise ConfigError(f"loss `{name}` does not exist{nearest(name, LOSSES)}")
        keys = keys_of(PolicyGradient)
        own = set(keys_of(LOSSES[name]).values()) - set(keys.values()) - _OF_ADVANTAGES
        for key in params:
            if key not in own:
                raise ConfigError(f"the loss `{name}` has no parameter `{key}`{nearest(key, own)}")
        made = build(LOSSES[name], name, params)
        for one in fields(PolicyGradient):
            # as `replace` does, without checking again what was checked here
            object.__setattr__(made, one.name, getattr(self, one.name))
        return made

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads."""
        return self.part.needs

    def prepare(self, rows: Examples, companions: Examples | None = None) -> Examples:
        """Add what the loss computes over the whole step."""
        return self.part.prepare(rows, companions)

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each token [B, T], and metrics without gradient."""
        return self.part.surrogate(batch, logprobs_BT, old_BT)
