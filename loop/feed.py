"""From the store to a training step: draw, credit, tokenise, and record what was drawn."""

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import polars as pl

from ..store import side
from ..store.errors import ConfigError, StarvedError
from ..store.ids import combine, row_digests
from ..store.sampling import Draw, Mixture, Sampler, Supply
from ..store.verify import FACTS
from .algorithms import Algorithm
from .batch import Examples, examples, trainable
from .chains import STORED, record, trainers, treated
from .drawing import Drawing, Horizon, check_runs, missing, sampler
from .models import tokenizer_digest
from .priorities import Priorities
from .runs import Job, Watch, pinned
from .tokens import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TABLES = pl.List(pl.Struct({"name": pl.String, "version": pl.Int64}))
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
        self.sampler = self._sampler()
        self._horizon = Horizon(config)
        columns = side.parse_all(config.trainer.with_columns)
        self._side = [c for c in columns if c.alias != "priority"]  # that is the sampler's
        side.check(self._source, self._side)
        self._watch = Watch(job)
        self._recorded: dict[int, pl.DataFrame] = {}
        self._credit = algorithm.advantage()
        self._chain = trainers(config.trainer, credit=self._credit, grouped=algorithm.grouped)
        self._columns = list(dict.fromkeys([*_COLUMNS, *self._chain.reads(STORED)]))
        self._trained: pl.DataFrame | None = None
        expression = config.trainer.new_priority
        self._priorities = Priorities(job, expression) if expression is not None else None

    def _sampler(self) -> Drawing:
        config, grouped = self._job.config, self._algorithm.grouped
        if self._online or config.trainer.new_priority is None:
            return sampler(self._source, config, grouped=grouped)
        then = self._source.versions()  # all but the priorities that the run itself will make
        until = {name: then[name] for name in then if name not in ("derived", "runs")}
        return sampler(self._job.store, config, grouped=grouped, until=until)

    def total_steps(self) -> int:
        """Return how many steps the run has: as configured, or until all rows are used up."""
        trainer = self._job.config.trainer
        check_runs(self._job.store, trainer.sampler.mixed or {})
        if self._online:
            assert trainer.steps is not None, "a run with an explorer says its steps"
            self.sampler.check(trainer.batch_size)
            return trainer.steps
        supply = self.sampler.supply(trainer.batch_size, 0)
        if not supply.fresh:
            raise ConfigError(
                f"there is nothing to train on: {supply}; look at `trainer.where`, "
                "`trainer.source` and `trainer.at`"
            )
        if trainer.steps is not None:
            self.sampler.check(min(trainer.batch_size, supply.fresh))
            return trainer.steps
        if isinstance(self.sampler, Mixture) or self.sampler.strategy.replacement:
            raise ConfigError(
                "`trainer.steps` is missing: rows of several sources, or put back after a draw, "
                "are never used up"
            )
        a_step = min(trainer.batch_size, supply.fresh)  # none has a row twice
        return -(-supply.fresh * trainer.epochs // a_step)

    def resume(self, start_step: int) -> None:
        """Take up the ledger: earlier steps' rows are drawn, a killed attempt's come again."""
        run = f"run_id = '{self._job.run_id}'"
        drawn = self._job.store.sql(
            "SELECT experience_id, source FROM draws_current "
            f"WHERE {run} AND step < {start_step} ORDER BY step, position"
        ).pl()
        self.sampler.restore(drawn["experience_id"].to_list(), sources=drawn["source"].to_list())
        again = self._job.store.sql(
            f"SELECT step, experience_id, source, weight FROM draws WHERE {run} "
            f"AND step >= {start_step} "
            "QUALIFY attempt = max(attempt) OVER (PARTITION BY step) ORDER BY step, position"
        ).pl()
        parts = again.partition_by("step", maintain_order=True)
        self._recorded = {part["step"][0]: part for part in parts}

    def next(self, step: int) -> tuple[Examples, dict[str, float]]:
        """Return the rows of a step, waiting for them if an explorer makes them, and measurements.

        Raises StarvedError when they do not come in time, or can never come.
        """
        recorded = self._recorded.pop(step, None)
        if recorded is not None:
            draw = self.sampler.redraw(
                recorded["experience_id"].to_list(),
                step=step,
                weights=recorded["weight"].to_list(),
                sources=recorded["source"].to_list(),
            )
        else:
            draw = self._wait(step) if self._online else self._stored(step)
        return self._prepare(draw, step)

    def learned(self, step: int, surprise: Sequence[float]) -> None:
        """Store what a step says of its rows: their new priority, if the run gives them one.

        `surprise` is that of the rows of `next`, in their order.
        """
        if self._priorities is not None and self._trained is not None and surprise:
            rows = self._trained.with_columns(surprise=pl.Series(surprise, dtype=pl.Float64))
            self._priorities.store(rows, step=step)

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
        schedule = self._job.config.schedule
        return self._job.store.wait_for(
            lambda: self._look(step),
            tables=("experiences", "runs"),
            seconds=schedule.wait_seconds,
            describe=lambda: self._described_wait(step),
            stop=self._stop,
        )

    def _described_wait(self, step: int) -> str:
        supply = self._supply(step)
        way_out = missing(self._job.store, self._job.config, supply)
        return f"step {step} of run `{self._job.run_id}`: {supply}; {way_out}"

    def _supply(self, step: int) -> Supply:
        size, horizon = self._job.config.trainer.batch_size, self._horizon.of(step)
        if isinstance(self.sampler, Mixture):
            return self.sampler.supply(size, step - 1, step=step, horizon=horizon)
        return self.sampler.supply(size, step - 1, horizon=horizon)

    def _look(self, step: int) -> Draw | None:
        size = self._size(step)
        draw = self._draw(step, size) if size else None
        if draw is None:
            self._watch.check("explore")
        return draw

    def _size(self, step: int) -> int:
        """Return how many units an online step draws, 0 while its rows are not all there.

        Rows of a replay that went stale before they were drawn often enough leave less than a
        batch, and no row that comes later may fill it up, or the step would not be repeatable.
        """
        size, horizon = self._job.config.trainer.batch_size, self._horizon.of(step)
        if horizon is None or isinstance(self.sampler, Mixture):
            return size
        supply = self.sampler.supply(size, step - 1, horizon=horizon)
        known = supply.fresh + supply.weightless + supply.stale + supply.used_up
        if known < horizon:
            return 0
        if not supply.fresh:
            way_out = "raise `schedule.max_lag`, `trainer.epochs` or `schedule.new_per_step`"
            if supply.weightless:
                way_out = "give some of them a priority above 0"
            raise StarvedError(
                f"step {step} of run `{self._job.run_id}` can never be drawn: {supply}; {way_out}"
            )
        return min(size, supply.fresh)

    def _draw(self, step: int, size: int) -> Draw | None:
        return self.sampler.draw(
            size, step=step, policy_version=step - 1, horizon=self._horizon.of(step)
        )

    def _stored(self, step: int) -> Draw:
        """Draw from what is there; the last step of an epoch's end may be smaller."""
        supply = self._supply(step)
        size = supply.need
        if isinstance(self.sampler, Sampler) and supply.draws is not None:
            size = min(size, supply.draws)
        draw = self._draw(step, size) if size else None
        if draw is None:
            raise StarvedError(
                f"step {step} of run `{self._job.run_id}` can never be drawn: {supply}; no "
                "explorer feeds this run: take fewer `trainer.steps`, or more `trainer.epochs`"
            )
        return draw

    def _prepare(self, draw: Draw, step: int) -> tuple[Examples, dict[str, float]]:
        rows = self.sampler.read(draw, self._columns)
        digests = pl.Series("digest", row_digests(rows.select(FACTS).to_arrow()))
        rows = rows.with_columns(advantage=pl.lit(None, pl.Float64))
        rows = self._treated(side.attach(self._source, rows, self._side), step)
        rows = rows.with_columns(
            digests,
            weight=pl.Series(draw.weights),
            epoch=pl.Series(draw.epochs),
            source=pl.Series(list(draw.sources), dtype=pl.String),
        )
        if self._credit is not None:
            rows = self._credit(rows.lazy()).collect(engine="in-memory")  # bit for bit the same
        rows = tokenize(rows.filter("allowed"), self._tokenizer)
        usable = self._trainable(rows) & rows["left_out"].is_null()
        if self._credit is not None:
            usable &= rows["advantage"].is_not_null()
        rows = rows.with_columns(weight=pl.when(usable).then("weight").otherwise(0.0))
        # versions of other runs count other steps: such rows have no lag
        own = rows["run_id"] == self._job.run_id
        lag = rows.select(lag=pl.when(own).then(step - 1 - pl.col("policy_version"))).to_series()
        rows = rows.with_columns(lag)
        self._record(step, rows, draw)
        kept = self._trained = rows.filter(usable)
        measured = {
            "train/rows": float(kept.height),
            "train/unusable_rows": float(rows.height - kept.height),
            "train/lag_mean": float(lag.mean() or 0.0),  # type: ignore[arg-type]
            "train/lag_max": float(lag.max() or 0.0),  # type: ignore[arg-type]
        }
        if self._chain:
            measured["train/left_out_rows"] = float(rows["left_out"].count())
        reward = rows["reward"].mean()
        if reward is not None:
            measured["train/reward_mean"] = float(reward)  # type: ignore[arg-type]
        return examples(kept, needs_logprobs=self._algorithm.needs_logprobs), measured

    def _treated(self, rows: pl.DataFrame, step: int) -> pl.DataFrame:
        """Let the operators treat a step's rows, and note why they leave some out.

        These stay in the step, so that statistics of groups see whole groups, and weigh nothing.
        """
        if not self._chain:
            return rows.with_columns(left_out=pl.lit(None, pl.String))
        rows, made = treated(self._chain, rows)
        attempt = f"{self._job.run_id}/{self._job.attempt:03d}/{step:06d}"
        record(self._job.store, made, lineage_id=attempt, drops=True)
        return rows

    def _trainable(self, rows: pl.DataFrame) -> pl.Series:
        return trainable(rows, vocabulary=self._vocabulary, max_length=self._max_length)

    @cached_property
    def _described(self) -> str:
        return self.sampler.describe()

    @cached_property
    def _tokenizer_digest(self) -> str:
        return tokenizer_digest(self._tokenizer)

    def _record(self, step: int, rows: pl.DataFrame, draw: Draw) -> None:
        """Write down the step's rows, before they are trained on."""
        tables = [{"name": name, "version": v} for name, v in draw.drawn_from.items()]
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
                sampler=pl.lit(self._described),
                tokenizer=pl.when("was_text").then(pl.lit(tokenizer)),
                digest="digest",
                source="source",
                batch_digest=pl.lit(combine(rows["digest"])),
                drawn_from=pl.lit(pl.Series([tables], dtype=_TABLES)).first(),
            ),
        )
