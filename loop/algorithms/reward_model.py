"""Reward modeling: a network that scores answers, trained on preferences.

In the model of Bradley and Terry (1952), an answer is preferred with probability sigmoid(score -
score of the other), so the loss of a pair is -log sigmoid(s_chosen - s_rejected) (arXiv:2203.02155,
equation 1). With `margin_coef`, the score of the chosen answer must be higher by `margin_coef`
times the stored `margin` (arXiv:2307.09288, equation 2; a pair without one has margin 0). Scores
are determined up to a constant; `center_coef` pulls their sum to 0 (arXiv:2312.09244, equation 2).

The trained model is not a policy: its weights are published for
`AutoModelForSequenceClassification` with one label. A score is read at the last trained token.

Metrics: `train/chosen_reward` and `train/rejected_reward` are the mean scores of chosen and
rejected rows, `train/reward_margin` the mean of their differences, `train/accuracy` the share of
pairs whose chosen row has the higher score, counting half of those with equal scores.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..losses import Algorithm, Loss, NonNegative, Unit
from ..losses.batch import Batch
from ..losses.preference import ranking, sides


@dataclass(frozen=True, kw_only=True)
class RewardModel(Algorithm):
    """Logistic loss of the difference of scores."""

    unit: ClassVar[Unit] = "pair"
    network: ClassVar[Literal["policy", "reward_model"]] = "reward_model"

    margin_coef: NonNegative = 0.0
    """Score difference per unit of the preference's `margin`; 0: no margin."""
    center_coef: NonNegative = 0.0
    """Weight of the squared sum of a pair's scores."""

    @property
    def needs(self) -> frozenset[str]:
        """The scores."""
        return frozenset({"scores"})

    def loss(self, batch: Batch, logprobs_BT: Tensor) -> Loss:
        """Logistic loss of the margin."""
        del logprobs_BT  # the model is not a language model
        scores = sides(batch.rows["scores"])
        margin_P = scores.margin_P
        if self.margin_coef and "margin" in batch.rows:
            wanted_P = torch.nan_to_num(sides(batch.rows["margin"]).chosen_P, nan=0.0)
            margin_P = margin_P - self.margin_coef * wanted_P
        sums_P = scores.chosen_P + scores.rejected_P
        losses_P = self.center_coef * sums_P.square() - logsigmoid(margin_P)
        value = batch.row_mean(losses_P * sides(batch.weight_B).chosen_P)
        return Loss(value, ranking(batch, sides(batch.rows["scores"].detach())))
