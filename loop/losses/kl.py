"""Estimates of the KL divergence of the trained policy from the reference policy."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...store.errors import ConfigError
from .algorithm import NonNegative, Positive, bounded
from .batch import Examples

Estimator = Literal["k1", "k2", "k3", "low_variance", "abs", "corrected_k3"]

STATE = "kl_coef"
"""Name of an adaptive coefficient in the algorithm's state."""
LOW_VARIANCE_LIMIT = 10.0
"""Largest absolute estimate of `low_variance` for a token, in nats."""
CORRECTION_LIMIT = 2.0
"""Largest weight of a token in `corrected_k3`."""
LARGEST_ERROR = 0.2
"""Largest relative error of the divergence to which an adaptive coefficient reacts."""


@dataclass(frozen=True, kw_only=True)
class KL:
    """A penalty on KL(pi || pi_reference); off with a coefficient of 0.

    With d = log pi/pi_reference of the token that was sampled, the first three estimators are those
    of http://joschu.net/blog/kl-approx.html; all but `k2` and `abs` have the divergence as their
    mean over samples of pi.

    An estimate of the divergence is not one of its gradient (arXiv:2506.09477). In the loss, over
    samples of pi: `k1` has a gradient whose mean is zero, noise and no penalty; `k2` has that of
    the divergence (of each token's distribution); `k3` and `low_variance` have that of
    KL(pi_reference || pi); `corrected_k3` has that of the divergence also over samples of another
    policy, as long as no token counts more than 2 (arXiv:2512.02556, without that limit). In the
    reward any estimator with the right mean gives the gradient of the whole sequence's divergence.
    """

    estimator: Estimator = "k3"
    """k1 d; k2 d^2 / 2; k3 exp(-d) - 1 + d; low_variance k3, between -10 and 10; abs |d|;
    corrected_k3 k3 times pi/pi_old, at most 2, pi_old being the policy that wrote the row."""
    coef: NonNegative = 0.0
    """Penalty per nat of divergence."""
    part_of: Literal["loss", "reward"] = "loss"
    """Whether it is added to the loss, or taken off each token's reward before advantages are
    computed, from the log-probs before the step. Groups are then compared anew, over their rows
    that are trained on."""
    target: Positive | None = None
    """Divergence, in nats per token, that an adaptive coefficient aims at; None: it is fixed."""
    horizon: Positive = 10.0
    """Steps in which a coefficient adapts; its reciprocal is K_beta of arXiv:1909.08593."""

    def __post_init__(self) -> None:
        """Raise ConfigError for parameters that contradict each other."""
        if self.target is not None and not self.coef:
            raise ConfigError(
                "`kl.target` is set and `kl.coef` is 0, which stays 0 however it is scaled; set an "
                "initial coefficient above 0"
            )
        if self.part_of == "reward" and self._is_corrected:
            raise ConfigError(
                "`kl.estimator` `corrected_k3` is for the loss: a reward has no gradient to correct"
            )

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads."""
        if not self.coef:
            return frozenset()
        if self.part_of == "reward":
            return frozenset({"reference", "proximal"})
        return frozenset({"reference"} | ({"logprobs"} if self._is_corrected else set()))

    @property
    def _is_corrected(self) -> bool:
        return self.estimator == "corrected_k3"

    @property
    def is_charged(self) -> bool:
        """Whether the penalty is subtracted from rewards."""
        return self.coef > 0 and self.part_of == "reward"

    def estimate(
        self, logprobs: Tensor, reference: Tensor, behavior: Tensor | None = None
    ) -> Tensor:
        """Return an estimate for each token, in nats; `behavior` is read by `corrected_k3`."""
        difference = logprobs - reference
        if self.estimator == "k1":
            return difference
        if self.estimator == "k2":
            return 0.5 * difference.square()
        if self.estimator == "abs":
            return difference.abs()
        if self.estimator == "k3":
            # Not bounded: that would bias it. Those who prefer a bound choose `low_variance`.
            return k3(difference)
        if self.estimator == "low_variance":
            return k3(bounded(difference)).clamp(-LOW_VARIANCE_LIMIT, LOW_VARIANCE_LIMIT)
        assert behavior is not None, "`needs` names the behavior policy's log-probs"
        weight = bounded(logprobs - behavior).exp().clamp(max=CORRECTION_LIMIT)
        return weight * k3(difference)

    def coefficient(self, state: Mapping[str, float]) -> float:
        """Return the coefficient of a step, given the state that `adapt` returned."""
        return state.get(STATE, self.coef)

    def charged(self, rows: Examples) -> Tensor:
        """Return the penalty on each token's reward [N], 0 for tokens that are not trained on.

        The divergence is that of the policy before the step, which on policy sampled the rows (as
        in arXiv:2203.02155, section 3.5). All 0 without a coefficient, and if the penalty is part
        of the loss.
        """
        mask = rows.tokens["mask"]
        if not self.is_charged:
            return torch.zeros_like(mask)
        estimate = self.estimate(rows.tokens["proximal"], rows.tokens["reference"])
        return self.coefficient(rows.state) * estimate.where(mask > 0, torch.zeros_like(mask))

    def adapt(self, state: Mapping[str, float], divergence: float | None) -> dict[str, float]:
        """Return the state with the next step's coefficient (arXiv:1909.08593, section 2.2).

        It is multiplied by 1 + error / `horizon`, where error is the relative difference of the
        divergence from the target, at most 0.2 on both sides. A fixed coefficient, and that of a
        step without a finite divergence, stays as it is.
        """
        if self.target is None or divergence is None or not math.isfinite(divergence):
            return dict(state)
        error = min(max(divergence / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        return {**state, STATE: self.coefficient(state) * (1 + error / self.horizon)}


def k3(difference: Tensor) -> Tensor:
    """Return the k3 estimate of KL(a || b) at samples of `a`, given log a - log b."""
    return torch.exp(-difference) - 1 + difference
