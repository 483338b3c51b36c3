"""GRPO on the policy's own answers, supervised fine-tuning on an expert's (MIX), arXiv:2505.17826.

Each step's loss is (1 - mu) times GRPO's over the rows that the policy wrote, plus mu times the
negative log-likelihood over the rows whose source is `expert`; each is a mean over its own rows.
The draw mixes them: `trainer.sampler: {mixed: ...}`. An expert's row needs neither reward nor
log-probs, and its likelihood is at temperature 1; likelihoods of the policy's own rows are at the
temperature of each. Assumes that the expert is worth imitating. With several mini-batches in a
step, rows have the same weight as in the whole step, so that each of an expert's rows does not
count more in a mini-batch with few of them.

Metrics: those of GRPO, over the policy's own tokens; `train/policy_loss` is its loss, `train/nll`
the mean negative log-likelihood of an expert's token in nats, both before they are weighted;
`train/mu` is the weight.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..losses import Aggregation, Loss, Share, aggregate
from ..losses.batch import Batch, Examples, Totals
from .grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class Mix(GRPO):
    """Clipped policy gradient on own rows and cross-entropy on an expert's."""

    takes_experts: ClassVar[bool] = True

    mu: Share = 0.1
    """Weight of the expert's rows."""
    aggregation: Aggregation = "token-mean"

    def mu_of(self, step: int) -> float:
        """Return the weight of the expert's rows in a training step, counted from 1."""
        del step
        return self.mu

    def imitation(self, logprobs_BT: Tensor) -> Tensor:
        """Return the loss of each of the expert's tokens: [B, T]."""
        return -logprobs_BT

    def prepare(self, rows: Examples, companions: Examples | None = None) -> Examples:
        """Prepare GRPO on the policy's own rows, and add the share of both kinds."""
        mask_N = rows.tokens["mask"]
        is_expert_R = rows.rows.get("is_expert", torch.zeros(len(rows), dtype=mask_N.dtype))
        own_N = mask_N * (1 - is_expert_R[rows.row_N].to(mask_N.dtype))
        # Under the mask of own rows, so that statistics of the step, as those of
        # a correction, are theirs.
        prepared = super().prepare(rows.with_tokens(mask=own_N), companions)
        shares = {
            _TOKENS: float(own_N.sum() / mask_N.sum().clamp(min=1)),
            _ROWS: float(1 - is_expert_R.mean()),
        }
        counted = replace(prepared, state={**prepared.state, **shares})
        return counted.with_tokens(mask=mask_N).with_rows(is_expert=is_expert_R)

    def loss(self, batch: Batch, logprobs_BT: Tensor) -> Loss:
        """Return the weighted sum of the two losses, each over its own rows."""
        mu = self.mu_of(batch.step)
        is_own_B = 1 - batch.rows["is_expert"].to(batch.mask_BT.dtype)
        tokens, rows = batch.state[_TOKENS], batch.state[_ROWS]
        own = super().loss(_part(batch, is_own_B, tokens, rows), logprobs_BT)
        expert = _part(batch, 1 - is_own_B, 1 - tokens, 1 - rows)
        losses_BT = self.imitation(logprobs_BT)
        imitation = aggregate(losses_BT, expert, self.aggregation, norm=self.norm)
        return Loss(
            (1 - mu) * own.value + mu * imitation,
            own.metrics
            | {
                "policy_loss": own.value.detach(),
                "nll": expert.token_mean(-logprobs_BT.detach()),
                "mu": batch.constant(mu),
            },
        )


_TOKENS, _ROWS = "own_tokens_of_all", "own_rows_of_all"


def _part(batch: Batch, is_in_B: Tensor, tokens: float, rows: float) -> Batch:
    """Return a batch in which only some rows are trained on, with shares of the update's totals."""
    # A step without such rows has a loss of 0: `or 1.0` avoids 0 / 0.
    totals = Totals(
        batch.totals.tokens * tokens or 1.0,
        batch.totals.sequences * rows or 1.0,
        batch.totals.units * rows or 1.0,
    )
    mask_BT = batch.mask_BT * is_in_B[:, None]
    return replace(batch.with_tokens(mask=mask_BT), totals=totals)
