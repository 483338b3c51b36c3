"""Direct preference optimization (DPO), arXiv:2305.18290.

The optimal policy under a reward with a KL penalty to the reference satisfies reward =
beta log(pi / pi_reference), up to a term of the prompt alone: so a reward model's loss on pairs,
-log sigmoid(r_chosen - r_rejected), trains the policy (equation 7). Assumes that the reference is
near the policy that sampled the pairs.

Labels may be wrong: with `label_smoothing` e as in conservative DPO, whose loss is (1 - e) times
that of the label plus e times that of its opposite (https://ericmitchell.ai/cdpo.pdf); with `noise`
unbiased as in robust DPO (arXiv:2403.00409), which subtracts the opposite's loss and divides by
1 - 2 e, so that its mean over labels flipped with probability e is the loss of correct ones. With
`normalize`, log-ratios are means over tokens (arXiv:2411.15124, section 5.1), so that longer
answers do not count more.

Metrics are those of `Pairwise`; the implicit reward of a row is beta log(pi / pi_reference).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..losses import Positive
from ..losses.batch import Batch
from ..losses.preference import Pairwise, Sides


@dataclass(frozen=True, kw_only=True)
class DPO(Pairwise):
    """Logistic loss of the difference of implicit rewards."""

    beta: Positive = 0.1
    """Implicit reward per nat of log-ratio to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The probability that a label is wrong."""
    noise: Literal["conservative", "unbiased"] = "conservative"
    """How wrong labels are corrected for."""
    normalize: bool = False
    """Whether log-ratios are means over tokens, not sums."""

    @property
    def needs(self) -> frozenset[str]:
        """The reference policy's log-probs."""
        return frozenset({"reference"})

    def rewards(self, batch: Batch, logprobs_BT: Tensor) -> Tensor:
        """Log-ratio to the reference, times beta."""
        ratio_BT = logprobs_BT - batch.tokens["reference"]
        ratio_B = batch.mean_tokens(ratio_BT) if self.normalize else batch.sum_tokens(ratio_BT)
        return self.beta * ratio_B

    def losses(self, rewards: Sides) -> Tensor:
        """Logistic loss of the margin."""
        # Not log(sigmoid), which is minus infinity for a pair that is ranked wrongly
        # by a wide margin.
        label_P, opposite_P = -logsigmoid(rewards.margin_P), -logsigmoid(-rewards.margin_P)
        wrong = self.label_smoothing
        if self.noise == "unbiased":
            return ((1 - wrong) * label_P - wrong * opposite_P) / (1 - 2 * wrong)
        return (1 - wrong) * label_P + wrong * opposite_P
