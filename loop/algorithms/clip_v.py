"""GRPO less the tokens that lower entropy most, by their vocabulary (Clip-V, arXiv:2602.03392).

To first order, a policy-gradient step on a token changes the entropy H of its distribution by minus
the advantage times S - E[S], with the discriminator S = p (H + log p) of the sampled token. Tokens
whose advantage is negative and whose S lies below E[S] by more than `mu` standard deviations of
that difference over the step are left out of the loss; E[S] is exact, over the whole vocabulary of
each token.

Unlike in Trinity-RFT, all tokens beyond `mu` deviations are left out by default; there at most a
share of 1e-4 is, those furthest below, as with `max_fraction: 1e-4`.

Metrics: those of all that leave out tokens by their discriminator.
"""

from dataclasses import dataclass

from torch import Tensor

from ..losses import Positive
from ..losses.batch import Examples
from ..losses.entropy_mask import Discriminating


@dataclass(frozen=True, kw_only=True)
class ClipV(Discriminating):
    """Clipped policy gradient on the tokens that do not lower entropy too much."""

    mu: Positive = 8.5
    """Standard deviations below the expectation from which a token is left out."""

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads."""
        return super().needs | {"old_discriminator"}

    def below(self, rows: Examples, score_N: Tensor) -> Tensor:
        """Return how far each token's discriminator is below its mean over the vocabulary: [N]."""
        return rows.tokens["old_discriminator"] - score_N
