"""What losses of preferences share: pairs of rows, implicit rewards, and how well they rank."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .algorithm import Algorithm, Loss, Unit
from .batch import Batch


@dataclass(frozen=True)
class Sides:
    """A number of each of P pairs' rows."""

    chosen_P: Tensor
    rejected_P: Tensor

    @property
    def margin_P(self) -> Tensor:
        """How far the chosen one is above the rejected one."""
        return self.chosen_P - self.rejected_P


def sides(values_B: Tensor) -> Sides:
    """Split numbers of rows, which come as chosen, rejected, chosen, rejected ...

    A row that stands alone, as in an empty batch, is of no pair.
    """
    whole_B = values_B[: len(values_B) // 2 * 2]
    return Sides(whole_B[0::2], whole_B[1::2])


@dataclass(frozen=True, kw_only=True)
class Pairwise(Algorithm):
    """A loss of each pair by what its two rows are worth; a subclass says which, in `losses`.

    Rows are those of stored preferences, so the policy need not have written them. The loss of a
    step is the mean over its pairs.

    Metrics of all: `train/chosen_reward` and `train/rejected_reward` are the means of what the
    chosen and the rejected rows are worth to the policy, as the algorithm defines it;
    `train/reward_margin` the mean of their differences; `train/accuracy` the share of pairs whose
    chosen row is worth more, half of those whose rows are worth the same; `train/chosen_logp` and
    `train/rejected_logp` the means of the rows' log-probs, summed over tokens.
    """

    unit: ClassVar[Unit] = "pair"
    likelihoods_at: ClassVar[float | None] = 1.0

    def rewards(self, batch: Batch, logprobs_BT: Tensor) -> Tensor:
        """Return what each row is worth to the policy: [B]."""
        raise NotImplementedError(f"`{type(self).__name__}` has no rewards")

    def losses(self, rewards: Sides) -> Tensor:
        """Return the loss of each pair: [P]."""
        raise NotImplementedError(f"`{type(self).__name__}` has no losses")

    def loss(self, batch: Batch, logprobs_BT: Tensor) -> Loss:
        """Take the mean of the pairs' losses, weighted as they were drawn."""
        rewards_B = self.rewards(batch, logprobs_BT)
        losses_P = self.losses(sides(rewards_B))
        value = batch.row_mean(losses_P * sides(batch.weight_B).chosen_P)
        logps = sides(batch.sum_tokens(logprobs_BT.detach()))
        return Loss(
            value,
            {
                **ranking(batch, sides(rewards_B.detach())),
                "chosen_logp": batch.row_mean(logps.chosen_P),
                "rejected_logp": batch.row_mean(logps.rejected_P),
            },
        )


def ranking(batch: Batch, rewards: Sides) -> dict[str, Tensor]:
    """Measure how well rewards rank the rows of pairs."""
    above_P = (rewards.margin_P > 0).to(rewards.margin_P.dtype)
    equal_P = (rewards.margin_P == 0).to(rewards.margin_P.dtype)
    return {
        "chosen_reward": batch.row_mean(rewards.chosen_P),
        "rejected_reward": batch.row_mean(rewards.rejected_P),
        "reward_margin": batch.row_mean(rewards.margin_P),
        "accuracy": batch.row_mean(above_P + 0.5 * equal_P),
    }
