"""GRPO less the tokens that lower entropy most, by the mean of the step (Clip-B, arXiv:2602.03392).

To first order, a policy-gradient step on a token changes the entropy H of its distribution by minus
the advantage times S - E[S], with the discriminator S = p (H + log p) of the sampled token. Tokens
whose advantage is negative and whose S lies more than `mu` standard deviations below the mean of
all trained tokens of the step are left out of the loss; the mean over the step stands for E[S].

Metrics: those of all that leave out tokens by their discriminator.
"""

from dataclasses import dataclass

from torch import Tensor

from ..losses import Positive
from ..losses.batch import Examples
from ..losses.entropy_mask import Discriminating


@dataclass(frozen=True, kw_only=True)
class ClipB(Discriminating):
    """Clipped policy gradient on the tokens that do not lower entropy too much."""

    mu: Positive = 2.5
    """Standard deviations below the mean from which a token is left out."""

    def below(self, rows: Examples, score_N: Tensor) -> Tensor:
        """Return how far each token's discriminator is below the mean of the step: [N]."""
        return score_N[rows.tokens["mask"] > 0].mean() - score_N
