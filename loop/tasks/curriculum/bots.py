"""Bayesian online task selection (BOTS, arXiv:2510.26374).

Each task's pass rate is believed to be Beta(alpha, beta). A batch counts as evidence for the tasks
that it tried (explicit), and, by interpolating between the pass rates of a weak and of a strong
reference model, for all others (implicit); everything fades towards the prior Beta(1, 1). Tasks are
chosen whose pass rate, sampled from what is believed (Thompson sampling), is nearest to the target.

Of a task without reference pass rates nothing is inferred: it counts its own tries only. They have
to last until it may be tried again, so at most half of them is forgotten in the time that it takes
to try all tasks once.
"""

import numpy as np

from ...config.tasks import BotsConfig
from .pass_rates import Outcomes, PassRatePosterior
from .selector import Chosen, softmaxed

_SMOOTH = 0.9
"""Share of the capability that a new estimate leaves."""
_WRONG = 0.25
"""Mean error of inferred pass rates from which on `adaptive_rho` trusts them half as much."""
_APART = 1e-6
"""References whose means are nearer than this tell nothing of the capability."""


class Bots:
    """Believes a Beta distribution of each task's pass rate, and chooses near the target."""

    def __init__(
        self,
        config: BotsConfig,
        *,
        size: int,
        tries: int,
        epoch: float,
        weak: np.ndarray | None = None,
        strong: np.ndarray | None = None,
    ) -> None:
        """Choose among `size` tasks, each tried `tries` times; `epoch` batches try all of them.

        `weak` and `strong` are the references' pass rates, NaN where they are not known.
        """
        self._config, self._tries = config, float(tries)
        unknown = np.full(size, np.nan)
        self._weak = unknown if weak is None or strong is None else weak
        self._strong = unknown if weak is None or strong is None else strong
        self._anchored = ~(np.isnan(self._weak) | np.isnan(self._strong))
        slow = min(config.decay, 1 - 0.5 ** (1 / max(1.0, epoch)))
        self._forget = np.where(self._anchored, config.decay, slow)
        self.beliefs = PassRatePosterior(np.ones(size), np.ones(size), rho=config.rho)

    def start(self, seen: Outcomes) -> None:
        """Count tries of runs before."""
        self.beliefs.alpha[seen.places] += seen.passes
        self.beliefs.beta[seen.places] += seen.tries - seen.passes

    def choose(self, n: int, *, first: int, rng: np.random.Generator) -> Chosen:
        """Choose n without replacement."""
        of, config = self.beliefs, self._config
        rates = rng.beta(of.alpha, of.beta) if config.thompson_sampling else of.mean
        scores = -np.abs(config.target - rates)
        places = softmaxed(scores, n, config.temperature, rng)
        return Chosen(places, scores[places], of.mean[places])

    def learn(self, seen: Outcomes) -> None:
        """Count a batch: its own tries, and what they tell of the other tasks."""
        of, forget = self.beliefs, self._forget
        assert of.rho is not None, "it starts as configured"
        inferred = self._infer(seen)
        successes, failures = np.zeros(len(of.alpha)), np.zeros(len(of.alpha))
        if inferred is not None:
            others = self._anchored.copy()
            others[seen.places] = False  # their own tries say it better
            successes[others] = of.rho * inferred[others] * self._tries
            failures[others] = of.rho * (1 - inferred[others]) * self._tries
        successes[seen.places] = seen.passes
        failures[seen.places] = seen.tries - seen.passes
        of.alpha = (1 - forget) * of.alpha + forget + successes
        of.beta = (1 - forget) * of.beta + forget + failures

    def _infer(self, seen: Outcomes) -> np.ndarray | None:
        """Return inferred pass rates, NaN without references; None while nothing tells them."""
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
        inferred = np.clip((self._strong - self._weak) * of.capability + self._weak, 0.0, 1.0)
        wrong = len(places) and np.abs(inferred[places] - rates).mean() >= _WRONG
        if self._config.adaptive_rho and wrong and of.rho is not None:
            of.rho /= 2
        return inferred
