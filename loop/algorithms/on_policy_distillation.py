"""On-policy distillation, arXiv:2306.13649 with the reverse divergence, token by token.

The policy samples, a teacher scores each token, and the advantage of a token is log p_teacher -
log pi_old: a policy-gradient step with it lowers KL(pi || p_teacher) in the contexts that the
policy itself generates. No reward is needed. Assumes that teacher and policy have the same
vocabulary; the teacher's log-probs are stored with the rows, or computed by `trainer.teacher`.

Metrics: `train/teacher_kl` is the mean of log pi_old - log p_teacher over trained tokens, which
estimates KL(pi_old || p_teacher) in nats a token.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..losses import Clipped, Count, Positive, Unit
from ..losses.batch import Batch, Examples


@dataclass(frozen=True, kw_only=True)
class OnPolicyDistillation(Clipped):
    """Clipped policy gradient with the teacher's log-probs minus the policy's as advantages."""

    unit: ClassVar[Unit] = "row"

    group_size: Count = 1
    scale: Positive = 1.0
    """Advantage per nat of difference."""

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads; the advantage is computed in `prepare`."""
        return (super().needs | {"logprobs", "teacher_logprobs"}) - {"advantage"}

    def prepare(self, rows: Examples, companions: Examples | None = None) -> Examples:
        """Add each token's advantage."""
        rows = super().prepare(rows, companions)
        difference = rows.tokens["teacher_logprobs"] - rows.tokens["logprobs"]
        return rows.with_tokens(advantage=self.scale * difference)

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Clipped surrogate, negated."""
        losses_BT, metrics = super().surrogate(batch, logprobs_BT, old_BT)
        log_ratio_BT = batch.logprobs_BT - batch.tokens["teacher_logprobs"]
        return losses_BT, metrics | {"teacher_kl": batch.token_mean(log_ratio_BT)}
