"""The critic of PPO and A2C: advantages of tokens, and the loss of values."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ...operators import Operator, reinforce
from .algorithm import Count, Loss, NonNegative, Positive, Share, Unit
from .batch import Batch, Examples
from .gae import earned, gae, whitened
from .policy_gradient import PolicyGradient

Discount = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class WithCritic(PolicyGradient):
    """Advantages of tokens from a critic's values, which are trained with the policy.

    Metrics of all: `train/value_loss` is half the mean squared error of the values;
    `train/value_clip_fraction` the share of tokens whose value changed by more than `clip_value`;
    `train/explained_variance` 1 - Var(returns - values)/Var(returns) before the step, left out if
    all returns are equal.
    """

    unit: ClassVar[Unit] = "row"

    group_size: Count = 1
    gamma: Discount = 1.0
    """Discount per trained token."""
    lam: Share = 0.95
    """Weight of returns over values (lambda of GAE): 1 uses returns, 0 the next token's value."""
    whiten: bool = True
    """Whether advantages are scaled to mean 0 and deviation 1 over the step's trained tokens."""
    clip_value: Positive | None = 0.2
    """Largest change of a value from before the step; None: no limit."""
    value_coef: NonNegative = 1.0
    """Weight of the critic's loss."""

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads."""
        return super().needs | {"reward", "token_rewards", "old_values", "values"}

    def advantage(self) -> Operator:
        """The reward, so that rows without one are left out; `prepare` computes those of tokens."""
        return reinforce()

    def prepare(self, rows: Examples, companions: Examples | None = None) -> Examples:
        """Add each token's advantage and return."""
        rows = super().prepare(rows, companions)
        mask_N, values_N = rows.tokens["mask"], rows.tokens["old_values"]
        rewards_N = earned(rows) - self.kl.charged(rows)
        advantage_N = gae(rows, rewards_N, values_N, gamma=self.gamma, lam=self.lam)
        # Before whitening: returns are sums of rewards, which the critic predicts.
        returns_N = (advantage_N + values_N) * (mask_N > 0)
        explained = _explained_variance(returns_N[mask_N > 0], values_N[mask_N > 0].double())
        if self.whiten:
            advantage_N = whitened(advantage_N, mask_N)
        columns = {"advantage": advantage_N.to(mask_N.dtype), "returns": returns_N.to(mask_N.dtype)}
        return replace(rows.with_tokens(**columns), state={**rows.state, **explained})

    def loss(self, batch: Batch, logprobs_BT: Tensor) -> Loss:
        """Add the critic's loss to the policy's."""
        policy = super().loss(batch, logprobs_BT)
        values_BT, old_BT = batch.tokens["values"], batch.tokens["old_values"]
        error_BT = (values_BT - batch.tokens["returns"]).square()
        metrics = dict(policy.metrics)
        if self.clip_value is not None:
            moved_BT = values_BT - old_BT
            bounded_BT = old_BT + moved_BT.clamp(-self.clip_value, self.clip_value)
            # The larger error, or the clip would hide how wrong a value is that has moved far.
            error_BT = torch.maximum(error_BT, (bounded_BT - batch.tokens["returns"]).square())
            beyond_BT = moved_BT.detach().abs() > self.clip_value
            metrics["value_clip_fraction"] = batch.token_mean(beyond_BT.to(error_BT.dtype))
        value = 0.5 * self.aggregate(error_BT, batch)
        metrics["value_loss"] = value.detach()
        if _EXPLAINED in batch.state:
            metrics[_EXPLAINED] = batch.constant(batch.state[_EXPLAINED])
        return Loss(policy.value + self.value_coef * value, metrics)


_EXPLAINED = "explained_variance"


def _explained_variance(returns_M: Tensor, values_M: Tensor) -> dict[str, float]:
    """Return how much of the returns' variance the values explain, if there is any."""
    total = float(returns_M.var(correction=0)) if len(returns_M) else 0.0
    if not total > 0:
        return {}
    return {_EXPLAINED: 1 - float((returns_M - values_M).var(correction=0)) / total}
