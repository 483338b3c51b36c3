"""Bayesian online task selection (BOTS, arXiv:2510.26374).

Each task's pass rate has a posterior Beta(alpha, beta). A batch is evidence for its own tasks
(explicit) and, by interpolating between the pass rates of a weak and a strong reference model, for
all others (implicit); all evidence decays towards the prior Beta(1, 1). The tasks whose pass rate,
sampled from the posterior (Thompson sampling), is nearest to the target are selected.

For a task without reference pass rates nothing is inferred: only its own rollouts count. They must
last until it is selected again, so at most half of them decays in one pass over all tasks.
"""

import numpy as np

from ...config.tasks import BotsConfig
from .selectors import Chosen, Outcomes, PassRatePosterior, softmaxed

_SMOOTH = 0.9
"""Weight of the old capability when it is updated with a new estimate."""
_WRONG = 0.25
"""Mean error of inferred pass rates at which `adaptive_rho` halves their weight."""
_APART = 1e-6
"""References whose mean pass rates are closer than this are not used."""


class Bots:
    """Keeps a Beta posterior of each task's pass rate, and selects tasks near the target."""

    def __init__(
        self,
        config: BotsConfig,
        *,
        size: int,
        rollouts: int,
        epoch: float,
        weak: np.ndarray | None = None,
        strong: np.ndarray | None = None,
    ) -> None:
        """Select among `size` tasks of `rollouts` rollouts each; `epoch` batches cover all of them.

        `weak` and `strong` are the references' pass rates, NaN where they are unknown.
        """
        self._config, self._rollouts = config, float(rollouts)
        unknown = np.full(size, np.nan)
        self._weak = unknown if weak is None or strong is None else weak
        self._strong = unknown if weak is None or strong is None else strong
        self._anchored = ~(np.isnan(self._weak) | np.isnan(self._strong))
        slow = min(config.decay, 1 - 0.5 ** (1 / max(1.0, epoch)))
        self._forget = np.where(self._anchored, config.decay, slow)
        self.beliefs = PassRatePosterior(np.ones(size), np.ones(size), rho=config.rho)

    def choose(self, n: int, *, first: int, rng: np.random.Generator) -> Chosen:
        """Choose n without replacement."""
        of, config = self.beliefs, self._config
        rates = rng.beta(of.alpha, of.beta) if config.thompson_sampling else of.mean
        scores = -np.abs(config.target - rates)
        places = softmaxed(scores, n, config.temperature, rng)
        return Chosen(places, scores[places], of.mean[places])

    def learn(self, seen: Outcomes) -> None:
        """Count a batch: its own rollouts, and what they imply about the other tasks."""
        of, forget = self.beliefs, self._forget
        assert of.rho is not None, "it starts as configured"
        inferred = self._infer(seen)
        successes, failures = np.zeros(len(of.alpha)), np.zeros(len(of.alpha))
        if inferred is not None:
            others = self._anchored.copy()
            others[seen.places] = False  # their own rollouts are better evidence
            successes[others] = of.rho * inferred[others] * self._rollouts
            failures[others] = of.rho * (1 - inferred[others]) * self._rollouts
        successes[seen.places] = seen.passes
        failures[seen.places] = seen.rollouts - seen.passes
        of.alpha = (1 - forget) * of.alpha + forget + successes
        of.beta = (1 - forget) * of.beta + forget + failures

    def _infer(self, seen: Outcomes) -> np.ndarray | None:
        """Return inferred pass rates, NaN without references; None before the first estimate."""
        of = self.beliefs
        known = self._anchored[seen.places]
        places, rates = seen.places[known], seen.rates[known]
        if len(places):
            weak, strong = self._weak[places].mean(), self._strong[places].mean()
            if abs(strong - weak) > _APART:
                now = float((rates.mean() - weak) / (strong - weak))
                before = of.capability
                of.capability = now if before is None else _SMOOTH * before + (1 - _SMOOTH) * now
        if of.capability is None:
            return None
        # Clipped, since a policy below the weak reference or above the strong one is extrapolated.
        inferred = np.clip((self._strong - self._weak) * of.capability + self._weak, 0.0, 1.0)
        wrong = len(places) and np.abs(inferred[places] - rates).mean() >= _WRONG
        if self._config.adaptive_rho and wrong and of.rho is not None:
            of.rho /= 2
        return inferred
