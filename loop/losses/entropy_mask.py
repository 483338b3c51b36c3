"""Mask the tokens that would lower the policy's entropy most (arXiv:2602.03392)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .algorithm import Positive, Share
from .batch import Batch, Examples
from .policy_gradient import Clipped, Credit


@dataclass(frozen=True, kw_only=True)
class Discriminating(Clipped):
    """GRPO's clipped surrogate on the kept tokens; a subclass defines them in `below`.

    Metrics of all: `train/kept_fraction` is the share of trained tokens that are kept.
    """

    mu: Positive
    """Standard deviations from which a token is left out."""
    max_fraction: Share | None = None
    """Largest share of the trained tokens that are left out, but at least one token: those that are
    furthest; None: all of them."""
    credit: Credit = "group_zscore"
    """Reward in standard deviations above the mean of its group."""

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads."""
        return super().needs | {"proximal", "old_entropy"}

    def below(self, rows: Examples, score_N: Tensor) -> Tensor:
        """Return how far each token's discriminator S is below its expectation: [N]."""
        raise NotImplementedError(f"`{type(self).__name__}` has no expectation")

    def prepare(self, rows: Examples, companions: Examples | None = None) -> Examples:
        """Mark the tokens that are kept."""
        rows = super().prepare(rows, companions)
        logp_N, entropy_N = rows.tokens["proximal"].double(), rows.tokens["old_entropy"].double()
        below_N = self.below(rows, logp_N.exp() * (entropy_N + logp_N))
        spread = below_N[rows.tokens["mask"] > 0].std(correction=0)
        # Equal values differ by rounding, which must not decide which tokens are left out.
        is_low_N = (below_N > self.mu * spread) & (spread > 1e-12)
        left_out_N = is_low_N & (rows.rows["advantage"][rows.row_N] < 0)
        if self.max_fraction is not None:
            is_trained_N = rows.tokens["mask"] > 0
            most = max(1, int(self.max_fraction * int(is_trained_N.sum())))
            left_out_N = _furthest(left_out_N & is_trained_N, below_N, most)
        return rows.with_tokens(kept=(~left_out_N).to(rows.tokens["mask"].dtype))

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Clipped surrogate of the tokens that are kept, negated."""
        losses_BT, metrics = super().surrogate(batch, logprobs_BT, old_BT)
        kept_BT = batch.tokens["kept"]
        metrics["kept_fraction"] = batch.token_mean(kept_BT)
        return torch.where(kept_BT > 0, losses_BT, 0.0), metrics


def _furthest(is_out_N: Tensor, below_N: Tensor, most: int) -> Tensor:
    """Keep the marks of the `most` tokens that are furthest below: [N]."""
    places_M = is_out_N.nonzero()[:, 0]
    order_M = below_N[places_M].argsort(descending=True, stable=True)
    return torch.zeros_like(is_out_N).index_fill(0, places_M[order_M[:most]], value=True)
