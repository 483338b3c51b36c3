"""Distillation by the generalized Jensen-Shannon divergence, arXiv:2306.13649.

With teacher P, policy Q and M = beta P + (1 - beta) Q, the divergence is beta KL(P || M) + (1 -
beta) KL(Q || M); beta 0 stands for KL(P || Q), beta 1 for KL(Q || P), which are its limits up to a
factor. Over the whole vocabulary it is exact at each trained token, whichever policy sampled the
row, with both distributions at the temperature of the row, and allows no other penalty or
correction. Over sampled tokens only log-probs are needed, the teacher's stored or of
`trainer.teacher`: the gradient of the divergence by Q is (1 - beta) log(q/m), so the advantage of a
token that the policy sampled is minus that, in an unbiased policy-gradient step.

Metrics: `train/divergence` is the divergence per trained token in nats, over sampled tokens its
estimate; `train/ratio`, `train/kl` and `train/entropy`, over sampled tokens only, are those of all
policy gradients.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...store.errors import ConfigError
from ..losses import Correction, Count, Loss, PolicyGradient, Share, Unit
from ..losses.algorithm import FURTHEST, bounded
from ..losses.batch import Batch, Examples
from ..losses.policy_gradient import ratio


@dataclass(frozen=True, kw_only=True)
class JSD(PolicyGradient):
    """Divergence from a teacher, between mode-covering and mode-seeking."""

    unit: ClassVar[Unit] = "row"

    group_size: Count = 1
    beta: Share = 0.5
    """0: the forward divergence, which covers modes; 1: the reverse, which seeks them."""
    over: Literal["vocabulary", "sampled"] = "vocabulary"
    """Whether whole distributions are compared, or log-probs of the sampled tokens."""

    def __post_init__(self) -> None:
        """Raise ConfigError for settings that only a loss of sampled tokens has."""
        super().__post_init__()
        if self.over == "vocabulary" and (
            self.kl.coef or self.entropy_coef or self.correction != Correction()
        ):
            raise ConfigError(
                "`jsd` over the vocabulary uses only the teacher's distribution; remove `kl`, "
                "`entropy_coef` and `correction`, or set `over: sampled`"
            )

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads; the advantage is computed in `prepare`."""
        if self.over == "vocabulary":
            return frozenset({"vocabulary"})
        return (super().needs | {"logprobs", "teacher_logprobs"}) - {"advantage"}

    def prepare(self, rows: Examples, companions: Examples | None = None) -> Examples:
        """Add each sampled token's advantage, and its term of the divergence's estimate."""
        if self.over == "vocabulary":
            return rows
        rows = super().prepare(rows, companions)
        teacher_N, own_N = rows.tokens["teacher_logprobs"], rows.tokens["logprobs"]
        near_N = own_N.clamp(min=-FURTHEST)  # the estimate divides by the probability
        return rows.with_tokens(
            advantage=-gradient(own_N, teacher_N, self.beta),
            divergence=divergence(near_N, teacher_N, self.beta) * torch.exp(-near_N),
        )

    def over_vocabulary(self, logprobs_MV: Tensor, teacher_MV: Tensor) -> Tensor:
        """Return the divergence of each pair of distributions: [M]."""
        return divergence(logprobs_MV, teacher_MV, self.beta).sum(-1)

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Importance-weighted advantage, negated."""
        estimate = batch.token_mean(batch.tokens["divergence"])
        gain_BT = ratio(batch, logprobs_BT, old_BT) * batch.advantage_BT
        return -gain_BT, {"divergence": estimate}

    def loss(self, batch: Batch, logprobs_BT: Tensor) -> Loss:
        """Divergence over the vocabulary, or the surrogate over sampled tokens."""
        if self.over == "sampled":
            return super().loss(batch, logprobs_BT)
        divergence_BT = batch.tokens["vocabulary"]
        value = self.aggregate(divergence_BT, batch)
        return Loss(value, {"divergence": batch.token_mean(divergence_BT.detach())})


def divergence(own: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return each token's term of the divergence, which is their sum over the vocabulary."""
    if beta == 0:
        return teacher.exp() * (teacher - own)
    if beta == 1:
        return own.exp() * (own - teacher)
    # In logarithms, because probabilities of unlikely tokens underflow.
    mixture = torch.logaddexp(teacher + math.log(beta), own + math.log1p(-beta))
    forward, reverse = teacher.exp() * (teacher - mixture), own.exp() * (own - mixture)
    return beta * forward + (1 - beta) * reverse


def gradient(own: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the derivative of the divergence by the probability of each token, up to a constant.

    A constant has no effect, because probabilities sum to 1.
    """
    if beta == 0:
        return -bounded(teacher - own).exp()
    if beta == 1:
        return own - teacher
    mixture = torch.logaddexp(teacher + math.log(beta), own + math.log1p(-beta))
    return (1 - beta) * (own - mixture)
