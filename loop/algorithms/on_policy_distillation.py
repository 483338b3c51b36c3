"""On-policy distillation, arXiv:2306.13649 with the reverse divergence, token by token.

The policy writes, a teacher says how likely it would have found each token, and each token is
credited with log p_teacher - log pi_old: a policy-gradient step along it lowers KL(pi || p_teacher)
at the contexts that the policy itself meets. No reward is needed. Assumes that teacher and policy
have the same tokens; the teacher's log-probs are those stored with the rows, or those of
`trainer.teacher`.

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
    """Clipped policy gradient with the teacher's log-probs less the policy's as advantages."""

    unit: ClassVar[Unit] = "row"

    group_size: Count = 1
    """Tries at each task."""
    scale: Positive = 1.0
    """What a nat of difference counts."""

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads; no advantage that was stored or drawn."""
        return (super().needs | {"logprobs", "teacher_logprobs"}) - {"advantage"}

    def prepare(self, rows: Examples, companions: Examples | None = None) -> Examples:
        """Give each token its advantage."""
        rows = super().prepare(rows, companions)
        message = rows.tokens["teacher_logprobs"] - rows.tokens["logprobs"]
        return rows.with_tokens(advantage=self.scale * message)

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Clipped surrogate, negated."""
        losses_BT, metrics = super().surrogate(batch, logprobs_BT, old_BT)
        told_BT = batch.logprobs_BT - batch.tokens["teacher_logprobs"]
        return losses_BT, metrics | {"teacher_kl": batch.token_mean(told_BT)}
