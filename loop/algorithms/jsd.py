"""Distillation by the generalised Jensen-Shannon divergence, arXiv:2306.13649.

With teacher P, policy Q and M = beta P + (1 - beta) Q, the divergence is
beta KL(P || M) + (1 - beta) KL(Q || M); beta 0 stands for KL(P || Q), beta 1 for KL(Q || P), which
are its limits up to a factor. Over the whole vocabulary it is exact at each trained token, whoever
wrote the row, with both at the temperature that the row was sampled at, and there is no penalty or
correction beside it. Over sampled tokens only log-probs
are needed, the teacher's stored or of `trainer.teacher`: the gradient of the divergence by Q is
(1 - beta) log(q/m), so that tokens which the policy sampled are credited with minus that, in a
policy-gradient step which is right in the mean.

Metrics: `train/divergence` is the divergence a trained token in nats, over sampled tokens its
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
    """The policy comes near a teacher, between covering its answers and seeking its best."""

    unit: ClassVar[Unit] = "row"

    group_size: Count = 1
    """Tries at each task."""
    beta: Share = 0.5
    """0: the forward divergence, which covers; 1: the reverse, which seeks."""
    over: Literal["vocabulary", "sampled"] = "vocabulary"
    """Whether whole distributions are compared, or log-probs of the tokens that came."""

    def __post_init__(self) -> None:
        """Raise ConfigError for what only a loss of sampled tokens has."""
        super().__post_init__()
        if self.over == "vocabulary" and (
            self.kl.coef or self.entropy_coef or self.correction != Correction()
        ):
            raise ConfigError(
                "`jsd` over the vocabulary asks nobody but the teacher, and not who wrote a row; "
                "take `kl`, `entropy_coef` and `correction` away, or set `over: sampled`"
            )

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads; no advantage that was stored or drawn."""
        if self.over == "vocabulary":
            return frozenset({"vocabulary"})
        return (super().needs | {"logprobs", "teacher_logprobs"}) - {"advantage"}

    def prepare(self, rows: Examples, companions: Examples | None = None) -> Examples:
        """Give each sampled token its advantage, and its part of the divergence's estimate."""
        if self.over == "vocabulary":
            return rows
        rows = super().prepare(rows, companions)
        teacher_N, own_N = rows.tokens["teacher_logprobs"], rows.tokens["logprobs"]
        near_N = own_N.clamp(min=-FURTHEST)  # so that no probability is 0
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
    """Return what each token adds to the divergence; summed over the vocabulary it is that."""
    if beta == 0:
        return teacher.exp() * (teacher - own)
    if beta == 1:
        return own.exp() * (own - teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), own + math.log1p(-beta))
    forward, reverse = teacher.exp() * (teacher - mixture), own.exp() * (own - mixture)
    return beta * forward + (1 - beta) * reverse


def gradient(own: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the derivative of the divergence by the probability of each token, up to a constant.

    What is the same for all tokens changes nothing, since probabilities add up to 1.
    """
    if beta == 0:
        return -bounded(teacher - own).exp()
    if beta == 1:
        return own - teacher
    mixture = torch.logaddexp(teacher + math.log(beta), own + math.log1p(-beta))
    return (1 - beta) * (own - mixture)
