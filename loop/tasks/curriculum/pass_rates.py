"""What is believed of each task's pass rate: successes and failures, counted and forgotten."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Outcomes:
    """What a batch came to, for the tasks of which a try could be judged."""

    places: np.ndarray
    passes: np.ndarray
    tries: np.ndarray

    @property
    def rates(self) -> np.ndarray:
        """The share of tries that passed."""
        return self.passes / self.tries


@dataclass
class PassRatePosterior:
    """Two counts a task, the parameters of a Beta distribution, and what BOTS knows beside."""

    alpha: np.ndarray
    """Successes counted."""
    beta: np.ndarray
    """Failures counted."""
    capability: float | None = None
    """How far the policy is from the weak reference (0) to the strong one (1)."""
    rho: float | None = None
    """Weight of inferred pass rates."""

    @property
    def mean(self) -> np.ndarray:
        """The expected pass rates."""
        return self.alpha / (self.alpha + self.beta)
