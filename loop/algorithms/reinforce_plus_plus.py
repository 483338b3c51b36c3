"""REINFORCE++, arXiv:2501.03262.

PPO without a critic: each token's advantage is the discounted sum of the rewards from it on, minus
the mean over all trained tokens of the step, in their standard deviations. The reward of an answer,
minus the baseline, goes to its last trained token; if all rows of a step have `token_rewards`,
these count instead. A KL penalty is subtracted from each token's reward, as in the paper, with `kl:
{coef: 0.01, estimator: k1, part_of: reward}`. `baseline: group_mean` is the paper's
REINFORCE++-baseline, for several rollouts of each task. Assumes that rewards of all tasks are on
one scale.

Unlike in verl and Trinity-RFT, whitening divides by the standard deviation with n (the
population's) plus 1e-8, and not by the root of the variance with n - 1 plus 1e-8. Advantages here
are sqrt(n / (n - 1)) of those, for 1,000 trained tokens 1.0005 times as large.

Metrics: `train/return` is the mean return of a token, before it is normalized.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...operators import Operator, group_centered, reinforce
from ..losses import Clipped, Count, Share, Unit
from ..losses.batch import Batch, Examples
from ..losses.gae import earned, gae, whitened


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(Clipped):
    """Clipped policy gradient with returns normalized over the step."""

    unit: ClassVar[Unit] = "row"

    group_size: Count = 1
    discount: Share = 1.0
    """Discount per trained token (the paper's gamma)."""
    baseline: Literal["none", "group_mean"] = "none"
    """What is subtracted from a reward first: nothing, or the mean of its group."""

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads."""
        return super().needs | {"token_rewards"}

    @property
    def grouped(self) -> bool:
        """Whether whole groups are drawn."""
        return self.baseline == "group_mean"

    def advantage(self) -> Operator:
        """The reward, minus the mean of its group if that is the baseline."""
        return group_centered() if self.grouped else reinforce()

    def prepare(self, rows: Examples, companions: Examples | None = None) -> Examples:
        """Add each token's return, normalized over the trained tokens of the step."""
        # Before `super().prepare`, which subtracts the KL penalty from the advantages of rows; here
        # it is subtracted from the rewards of tokens, and must not count twice.
        credited = rows.with_rows(reward=rows.rows["advantage"])
        rewards_N = earned(credited) - self.kl.charged(rows)
        nothing_N = torch.zeros_like(rewards_N)
        returns_N = gae(rows, rewards_N, nothing_N, gamma=self.discount, lam=1.0)
        advantage_N = whitened(returns_N, rows.tokens["mask"])
        kind = rows.tokens["mask"].dtype
        rows = super().prepare(rows, companions)
        return rows.with_tokens(advantage=advantage_N.to(kind), returns=returns_N.to(kind))

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Clipped surrogate, negated."""
        losses_BT, metrics = super().surrogate(batch, logprobs_BT, old_BT)
        return losses_BT, metrics | {"return": batch.token_mean(batch.tokens["returns"])}
