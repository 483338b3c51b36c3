"""From the store to a training step: draw, credit, tokenise, and record what was drawn."""

import threading
from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING

import polars as pl

from ..store.errors import ConfigError, StarvedError, nearest
from ..store.ids import row_digests
from ..store.sampling import STRATEGIES, Draw, Freshness, Sampler, Strategy
from ..store.verify import FACTS
from .algorithms import Algorithm
from .batch import Examples, examples, trainable
from .models import tokenizer_digest
from .runs import Job, Watch, pinned
from .tokens import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_COLUMNS = ("experience_id", "run_id", "group_id", "policy_version", *FACTS)


class Feed:
    """Gives each training step its rows, and writes down which they were before they are used."""

    def __init__(
        self,
        job: Job,
        algorithm: Algorithm,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        vocabulary: int | None,
        max_length: int | None,
        stop: threading.Event,
    ) -> None:
        config = job.config
        self._job, self._algorithm, self._stop = job, algorithm, stop
        self._tokenizer = tokenizer
        self._vocabulary, self._max_length = vocabulary, max_length
        self._online = config.explorer is not None
        # an offline run trains on what was stored when it began, whatever is imported later
        self._source = job.store if self._online else pinned(job, "rows")
        self.sampler = Sampler(
            self._source,
            strategy=strategy(config.trainer.sampler),
            freshness=Freshness(config.schedule.lag if self._online else None),
            grouped=algorithm.grouped,
            where=config.trainer.trained_where,
            run_id=job.run_id if self._online else None,
            max_draws=config.trainer.epochs,
            seed=config.seed,
        )
        self._watch = Watch(job)
        self._recorded: dict[int, list[str]] = {}
        self._credit = algorithm.advantage()

    def total_steps(self) -> int:
        """Return how many steps the run has: as configured, or until all rows are used up."""
        trainer = self._job.config.trainer
        supply = self.sampler.supply(trainer.batch_size, 0)
        if trainer.steps is None or (not self._online and not supply.fresh):
            if not supply.fresh:
                raise ConfigError(
                    f"there is nothing to train on: {supply}; look at `trainer.where`"
                )
            a_step = min(trainer.batch_size, supply.fresh)  # none has a row twice
            return trainer.steps or -(-supply.fresh * trainer.epochs // a_step)
        return trainer.steps

    def resume(self, start_step: int) -> None:
        """Take up the ledger: earlier steps' rows are drawn, a killed attempt's come again."""
        run = f"run_id = '{self._job.run_id}'"
        drawn = self._job.store.sql(
            f"SELECT experience_id FROM draws_current WHERE {run} AND step < {start_step}"
        ).pl()
        self.sampler.restore(drawn["experience_id"].to_list())
        again = self._job.store.sql(
            f"SELECT step, experience_id FROM draws WHERE {run} AND step >= {start_step} "
            "QUALIFY attempt = max(attempt) OVER (PARTITION BY step) ORDER BY step, position"
        ).fetchall()
        recorded = defaultdict(list)
        for step, experience_id in again:
            recorded[step].append(experience_id)
        self._recorded = dict(recorded)

    def next(self, step: int) -> tuple[Examples, dict[str, float]]:
        """Return the rows of a step, waiting for them if an explorer makes them, and measurements.

        Raises StarvedError when they do not come in time, or can never come.
        """
        recorded = self._recorded.pop(step, None)
        if recorded is not None:
            draw = self.sampler.redraw(recorded, step=step)
        else:
            draw = self._wait(step) if self._online else self._stored(step)
        return self._prepare(draw, step)

    def held_out(self, where: str, *, rows_at_once: int = 256) -> list[Examples]:
        """Return stored rows for which a condition holds, tokenised, for measuring only."""
        sampler = Sampler(self._source, where=where)
        parts = []
        while (supply := sampler.supply(1, 0)).fresh:
            draw = sampler.draw(min(rows_at_once, supply.fresh), step=0, policy_version=0)
            assert draw is not None, "as many as there are can be drawn"
            rows = tokenize(self.sampler.read(draw, _COLUMNS), self._tokenizer)
            rows = rows.with_columns(advantage=pl.lit(0.0), weight=pl.lit(1.0))
            parts.append(examples(rows.filter(self._trainable(rows)), needs_logprobs=False))
        if not parts:
            raise ConfigError(f"no stored row matches `trainer.evaluate_loss_where`: {where}")
        return parts

    def _wait(self, step: int) -> Draw:
        trainer, schedule = self._job.config.trainer, self._job.config.schedule
        version = step - 1
        return self._job.store.wait_for(
            lambda: self._look(step, version),
            tables=("experiences", "runs"),
            seconds=schedule.wait_seconds,
            describe=lambda: (
                f"step {step} of run `{self._job.run_id}`: "
                f"{self.sampler.supply(trainer.batch_size, version)}; is its explorer running?"
            ),
            stop=self._stop,
        )

    def _look(self, step: int, version: int) -> Draw | None:
        draw = self.sampler.draw(
            self._job.config.trainer.batch_size, step=step, policy_version=version
        )
        if draw is None:
            self._watch.check("explore")
        return draw

    def _stored(self, step: int) -> Draw:
        """Draw from what is there; the last step of an epoch's end may be smaller."""
        trainer = self._job.config.trainer
        supply = self.sampler.supply(trainer.batch_size, step - 1)
        draw = self.sampler.draw(
            min(trainer.batch_size, supply.fresh), step=step, policy_version=step - 1
        )
        if draw is None or not supply.fresh:
            raise StarvedError(
                f"step {step} of run `{self._job.run_id}` can never be drawn: {supply}; no "
                "explorer feeds this run: take fewer `trainer.steps`, or more `trainer.epochs`"
            )
        return draw

    def _prepare(self, draw: Draw, step: int) -> tuple[Examples, dict[str, float]]:
        rows = self.sampler.read(draw, _COLUMNS)
        digests = pl.Series("digest", row_digests(rows.select(FACTS).to_arrow()))
        rows = rows.with_columns(
            digests,
            weight=pl.Series(draw.weights),
            epoch=pl.Series(draw.epochs),
            advantage=pl.lit(None, pl.Float64),
        )
        if self._credit is not None:
            rows = self._credit(rows.lazy()).collect(engine="in-memory")  # bit for bit the same
        rows = tokenize(rows.filter("allowed"), self._tokenizer)
        usable = self._trainable(rows)
        if self._credit is not None:
            usable &= rows["advantage"].is_not_null()
        rows = rows.with_columns(weight=pl.when(usable).then("weight").otherwise(0.0))
        # versions of other runs count other steps: such rows have no lag
        own = rows["run_id"] == self._job.run_id
        lag = rows.select(lag=pl.when(own).then(step - 1 - pl.col("policy_version"))).to_series()
        self._record(step, rows.with_columns(lag))
        kept = rows.filter(usable)
        measured = {
            "train/rows": float(kept.height),
            "train/unusable_rows": float(rows.height - kept.height),
            "train/lag_mean": float(lag.mean() or 0.0),  # type: ignore[arg-type]
            "train/lag_max": float(lag.max() or 0.0),  # type: ignore[arg-type]
        }
        reward = rows["reward"].mean()
        if reward is not None:
            measured["train/reward_mean"] = float(reward)  # type: ignore[arg-type]
        return examples(kept, needs_logprobs=self._algorithm.needs_logprobs), measured

    def _trainable(self, rows: pl.DataFrame) -> pl.Series:
        return trainable(rows, vocabulary=self._vocabulary, max_length=self._max_length)

    @cached_property
    def _tokenizer_digest(self) -> str:
        return tokenizer_digest(self._tokenizer)

    def _record(self, step: int, rows: pl.DataFrame) -> None:
        tokenizer = self._tokenizer_digest if rows["was_text"].any() else None
        self._job.store.append(
            "draws",
            rows.select(
                run_id=pl.lit(self._job.run_id),
                attempt=pl.lit(self._job.attempt),
                step=pl.lit(step),
                position=pl.int_range(pl.len()),
                experience_id="experience_id",
                epoch="epoch",
                weight="weight",
                lag="lag",
                advantage="advantage",
                sampler=pl.lit(self.sampler.strategy.name),
                tokenizer=pl.when("was_text").then(pl.lit(tokenizer)),
                digest="digest",
            ),
        )


def strategy(name: str) -> Strategy:
    """Return the way of drawing that a configuration names."""
    if name not in STRATEGIES:
        raise ConfigError(f"there is no sampler `{name}`{nearest(name, STRATEGIES)}")
    return STRATEGIES[name]()
