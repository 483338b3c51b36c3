"""Selection by pass rate: an SQL weight over how often each task was solved."""

import numpy as np
import polars as pl

from ....operators.body import evaluate
from ....store.errors import ConfigError, QueryError
from ...config.tasks import ByPassRateConfig
from .selectors import Chosen, Outcomes, PassRatePosterior, weighted


class ByPassRate:
    """Selects tasks with probability proportional to a weight of their pass rates."""

    def __init__(self, config: ByPassRateConfig, facts: pl.DataFrame, *, epoch: float) -> None:
        """Select among the rows of `facts`, whose columns the weight may name too.

        `epoch` is the number of batches in one pass over all of them.
        """
        self._config, self._facts = config, facts
        self._kept = 0.5 ** (1 / (config.half_life or max(1.0, epoch)))
        self.beliefs = PassRatePosterior(np.zeros(facts.height), np.zeros(facts.height))
        # An invalid expression is refused here, before the first rollout.
        self._weights()

    def learn(self, seen: Outcomes) -> None:
        """Count a batch, after decaying the counts so far."""
        self.beliefs.alpha *= self._kept
        self.beliefs.beta *= self._kept
        self.beliefs.count(seen)

    def choose(self, n: int, *, first: int, rng: np.random.Generator) -> Chosen:
        """Choose n without replacement."""
        weights = self._weights()
        places = weighted(weights, n, rng)
        return Chosen(places, weights[places], self._rates()[places])

    def _rates(self) -> np.ndarray:
        of, rollouts = self.beliefs, self._config.prior_count
        passes, total = of.alpha.sum(), (of.alpha + of.beta).sum()
        prior = self._config.prior_mean
        if prior is None:
            prior = float(passes / total) if total else 0.5
        return (of.alpha + prior * rollouts) / (of.alpha + of.beta + rollouts)

    def _weights(self) -> np.ndarray:
        """Return the weight of each task.

        Raises ConfigError if the expression is not valid, or returns an invalid weight.
        """
        sql, of = self._config.weight, self.beliefs
        rows = self._facts.with_columns(
            pass_rate=pl.Series(self._rates()), num_rollouts=pl.Series(of.alpha + of.beta)
        ).with_row_index("place_of_task")
        query = f"SELECT ({sql}\n)::DOUBLE AS weight FROM input"
        try:
            # An aggregate returns one row, which is refused below; windows return any order.
            if len(evaluate(query, rows.clear())) == 0:
                query += " ORDER BY place_of_task"
            found = evaluate(query, rows)["weight"].fill_null(0.0)
        except QueryError as error:
            raise ConfigError(f"`by_pass_rate.weight`: {error}") from error
        bad = ~(found.is_finite() & (found >= 0))
        if len(found) != rows.height or bad.any():
            got = (
                f"{found.filter(bad)[0]}" if bad.any() else f"{len(found)} for {rows.height} tasks"
            )
            raise ConfigError(
                f"`by_pass_rate.weight` must give a finite number of at least 0 a task, got {got}: "
                f"{sql}"
            )
        return found.to_numpy()
