"""The parts that preference losses share: pairs of rows, implicit rewards, ranking metrics."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .algorithm import Algorithm, Loss, Unit
from .batch import Batch


@dataclass(frozen=True)
class Sides:
    """A number for each row of P pairs."""

    chosen_P: Tensor
    rejected_P: Tensor

    @property
    def margin_P(self) -> Tensor:
        """The chosen row's number minus the rejected row's."""
        return self.chosen_P - self.rejected_P


def sides(values_B: Tensor) -> Sides:
    """Split numbers of rows, which come as chosen, rejected, chosen, rejected ...

    The single row of an empty batch belongs to no pair.
    """
    whole_B = values_B[: len(values_B) // 2 * 2]
    return Sides(whole_B[0::2], whole_B[1::2])


@dataclass(frozen=True, kw_only=True)
class Pairwise(Algorithm):
    """A loss of each pair from its rows' implicit rewards; a subclass defines it in `losses`.

    Rows are those of stored preferences, which any policy may have sampled. The loss of a step is
    the mean over its pairs.

    Metrics of all: `train/chosen_reward` and `train/rejected_reward` are the mean implicit rewards
    of the chosen and the rejected rows, as the algorithm defines them; `train/reward_margin` the
    mean of their differences; `train/accuracy` the share of pairs whose chosen row has the higher
    one, counting half of those whose rows have the same; `train/chosen_logp` and
    `train/rejected_logp` the means of the rows' log-probs, summed over tokens.
    """

    unit: ClassVar[Unit] = "pair"
    likelihoods_at: ClassVar[float | None] = 1.0

    def rewards(self, batch: Batch, logprobs_BT: Tensor) -> Tensor:
        """Return the implicit reward of each row: [B]."""
        raise NotImplementedError(f"`{type(self).__name__}` has no rewards")

    def losses(self, rewards: Sides) -> Tensor:
        """Return the loss of each pair: [P]."""
        raise NotImplementedError(f"`{type(self).__name__}` has no losses")

    def loss(self, batch: Batch, logprobs_BT: Tensor) -> Loss:
        """Take the mean of the pairs' losses, with the weights of the draw."""
        rewards_B = self.rewards(batch, logprobs_BT)
        losses_P = self.losses(sides(rewards_B))
        # Both rows of a pair have the weight of its draw.
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
    """Return metrics of how well rewards rank the rows of pairs."""
    above_P = (rewards.margin_P > 0).to(rewards.margin_P.dtype)
    equal_P = (rewards.margin_P == 0).to(rewards.margin_P.dtype)
    return {
        "chosen_reward": batch.row_mean(rewards.chosen_P),
        "rejected_reward": batch.row_mean(rewards.rejected_P),
        "reward_margin": batch.row_mean(rewards.margin_P),
        "accuracy": batch.row_mean(above_P + 0.5 * equal_P),
    }
