"""From the store to a training step: draw, credit, tokenise, and record what was drawn."""

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import polars as pl

from ...pipelines.inline import STORED, apply_before_train, record, trainer_chain
from ...store.errors import ConfigError, StarvedError
from ...store.ids import combine, row_digests
from ...store.replay import Draw, Mixture, Sampler, Supply
from ...store.verify_draws import ABSENT, FACTS
from ..algorithms import Algorithm
from ..losses.batch import (
    Examples,
    at_temperature,
    examples,
    experts_to_imitate,
    untrainable,
    without_missing_logprobs,
)
from ..runs.job import Job, Watch, pinned
from ..schedule.samplers import (
    RowSampler,
    check_runs,
    check_sides,
    missing,
    nothing_to_draw,
    sampler,
)
from ..schedule.units import UnitSchedule
from . import preferences
from .lag_metrics import lags
from .priority_updates import Priorities
from .token_check import TokenCheck, why_foreign
from .tokenize import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TABLES = pl.List(pl.Struct({"name": pl.String, "version": pl.Int64}))
_COLUMNS = ("experience_id", "run_id", "group_id", "policy_version", *FACTS)
_COLUMNS += ("tools", "tokenizer", "source", "drop_reason", "created_at")


class TrainDataLoader:
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
        self._check = TokenCheck(tokenizer, config.trainer.foreign_tokens)
        self._vocabulary, self._max_length = vocabulary, max_length
        self._online = config.explorer is not None
        self._temperature = config.explorer.sampling.temperature if config.explorer else 1.0
        # an offline run trains on what was stored when it began, whatever is imported later
        self._source = job.store if self._online else pinned(job, "rows")
        self.sampler = self._sampler()
        self._horizon = UnitSchedule(config)
        check_sides(self._source, config)
        self._watch = Watch(job)
        self._recorded: dict[int, pl.DataFrame] = {}
        self._credit = algorithm.advantage()
        self._are_pairs = algorithm.unit == "pair"
        self._key = "preference_id" if self._are_pairs else "experience_id"
        # what is held out is measured row by row, and has no groups
        self._labels = None if algorithm.grouped else self._credit
        self._chain = trainer_chain(
            config.trainer.operators,
            config.trainer.side_columns,
            credit=self._credit,
            grouped=algorithm.grouped,
        )
        beside = {"teacher_logprobs"} if config.trainer.teacher else set()
        self._needs = algorithm.needs - beside  # the teacher gives them
        read = {*algorithm.needs, *(self._credit.reads if self._credit else ())}
        needed = [name for name in STORED if name in read]
        self._columns = list(dict.fromkeys([*_COLUMNS, *needed, *self._chain.reads(STORED)]))
        self._trained: pl.DataFrame | None = None
        expression = config.trainer.priority_update
        self._priorities = Priorities(job, expression) if expression is not None else None

    def _sampler(self) -> RowSampler:
        config, algorithm = self._job.config, self._algorithm
        if self._online or config.trainer.priority_update is None:
            return sampler(self._source, config, algorithm)
        then = self._source.versions()  # all but the priorities that the run itself will make
        until = {
            name: then[name] for name in then if name not in ("experience_values", "job_events")
        }
        return sampler(self._job.store, config, algorithm, until=until)

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
            raise nothing_to_draw(self._source, self._algorithm, supply)
        if trainer.steps is not None:
            self.sampler.check(min(trainer.batch_size, supply.fresh))
            return trainer.steps
        if isinstance(self.sampler, Mixture) or self.sampler.strategy.replacement:
            raise ConfigError(
                "`trainer.steps` is missing: rows of several sources, or put back after a draw, "
                "are never used up"
            )
        a_step = min(trainer.batch_size, supply.fresh)  # none has a row twice
        return -(-supply.fresh * trainer.max_uses // a_step)

    def resume(self, start_step: int) -> None:
        """Take up the ledger: earlier steps' rows are drawn, a killed attempt's come again."""
        run = f"run_id = '{self._job.run_id}'"
        drawn = self._job.store.sql(
            f"SELECT {self._key} AS id, source FROM draws_current "
            f"WHERE {run} AND step < {start_step} ORDER BY step, position"
        ).pl()
        self.sampler.restore(drawn["id"].to_list(), sources=drawn["source"].to_list())
        again = self._job.store.sql(
            f"SELECT step, {self._key} AS id, source, weight, drawn_from FROM draws WHERE {run} "
            f"AND step >= {start_step} "
            "QUALIFY attempt = max(attempt) OVER (PARTITION BY step) ORDER BY step, position"
        ).pl()
        parts = again.partition_by("step", maintain_order=True)
        self._recorded = {part["step"][0]: part for part in parts}

    def next_batch(self, step: int) -> tuple[Examples, dict[str, float]]:
        """Return the rows of a step, waiting for them if an explorer makes them, and measurements.

        Raises StarvedError when they do not come in time, or can never come.
        """
        recorded = self._recorded.pop(step, None)
        if recorded is not None:
            draw = self.sampler.redraw(
                recorded["id"].to_list(),
                step=step,
                weights=recorded["weight"].to_list(),
                sources=recorded["source"].to_list(),
                drawn_from={
                    t["name"]: t["version"] for t in recorded["drawn_from"].to_list()[0] or ()
                },
            )
        else:
            draw = self._wait(step) if self._online else self._stored(step)
        return self._prepare(draw, step)

    def record_priorities(self, step: int, surprise: Sequence[float]) -> None:
        """Store what a step says of its rows: their new priority, if the run gives them one.

        `surprise` is that of the rows of `next`, in their order.
        """
        if self._priorities is not None and self._trained is not None and surprise:
            rows = self._trained.with_columns(surprise=pl.Series(surprise, dtype=pl.Float64))
            self._priorities.store(rows, step=step)

    def held_out(self, where: str, *, rows_at_once: int = 256) -> list[Examples]:
        """Return stored rows for which a condition holds, tokenised, for measuring only."""
        sampler = Sampler(
            self._source,
            where=where,
            table=self._algorithm.table,
            with_columns=self._job.config.trainer.side_columns,
        )
        parts = []
        while (supply := sampler.supply(1, 0)).fresh:
            draw = sampler.draw(min(rows_at_once, supply.fresh), step=0, policy_version=0)
            assert draw is not None, "as many as there are can be drawn"
            rows = sampler.read(draw, self._columns).with_columns(weight=pl.lit(1.0))
            rows = rows.with_columns(advantage=pl.lit(None if self._labels else 0.0, pl.Float64))
            rows = sampler.with_sides(draw, rows)
            if self._labels is not None:
                rows = self._labels(rows.lazy()).collect(engine="in-memory")
            rows = self._at_temperature(self._tokenized(rows))
            if self._algorithm.takes_experts:
                rows = experts_to_imitate(rows.with_columns(is_expert=pl.col("source") == "expert"))
            rows = self._with_units(rows)
            usable = rows.filter(self._usable(rows, rows["advantage"].is_not_null()))
            parts.append(examples(usable, needs=self._needs))
        if not any(len(part) for part in parts):
            raise ConfigError(
                f"no stored {self._algorithm.unit} matches `trainer.eval_where`: {where}"
            )
        return parts

    def _wait(self, step: int) -> Draw:
        schedule = self._job.config.schedule
        return self._job.store.wait_for(
            lambda: self._look(step),
            tables=("experiences", "job_events"),
            seconds=schedule.timeout,
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
            way_out = (
                "raise `schedule.max_lag`, `trainer.max_uses` or `schedule.new_units_per_step`"
            )
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
                "explorer feeds this run: take fewer `trainer.steps`, or more `trainer.max_uses`"
            )
        return draw

    def _prepare(self, draw: Draw, step: int) -> tuple[Examples, dict[str, float]]:
        rows = self.sampler.read(draw, self._columns)
        digests = pl.Series("digest", row_digests(rows.select(FACTS).to_arrow()))
        digests = digests.set(rows["created_at"].is_null(), ABSENT)
        rows = rows.with_columns(advantage=pl.lit(None, pl.Float64))
        rows = self.sampler.with_sides(draw, rows)
        replaced = rows["replaced"]
        rows = self._treated(rows.drop("replaced"), step).with_columns(
            replaced,
            digests,
            is_expert=pl.col("source") == "expert",
            group=pl.col("group_id").rank("dense"),
            weight=pl.Series(draw.weights),
            epoch=pl.Series(draw.epochs),
            source=pl.Series(list(draw.sources), dtype=pl.String),
        )
        if self._credit is not None:
            rows = self._credit(rows.lazy()).collect(engine="in-memory")  # bit for bit the same
        rows = rows.filter("allowed")
        rows = self._at_temperature(self._with_units(self._tokenized(rows)))
        if self._algorithm.takes_experts:
            rows = experts_to_imitate(rows)
        kept = rows["left_out"].is_null()
        if self._credit is not None:
            kept &= rows["advantage"].is_not_null()
        usable = self._usable(rows, kept)
        self._note_untrainable(rows.filter(kept), step)
        rows = rows.with_columns(weight=pl.when(usable).then("weight").otherwise(0.0))
        # versions of other runs count other steps: such rows have no lag
        own = rows["run_id"] == self._job.run_id
        lag = rows.select(lag=pl.when(own).then(step - 1 - pl.col("policy_version"))).to_series()
        rows = rows.with_columns(lag)
        self._record(step, rows, draw)
        kept = self._trained = rows.filter(usable)
        measured = {
            "train/rows": float(kept.height),
            "train/untrainable_rows": float(rows.height - kept.height),
        } | lags(lag)
        measured |= self._check.counted(rows)
        if self._chain:
            measured["train/filtered_rows"] = float(rows["left_out"].count())
        if self._credit is not None:  # as in groups of equal rewards: they teach nothing
            measured["train/zero_advantage_rows"] = float((kept["advantage"] == 0).sum())
        reward = rows["reward"].mean()
        if reward is not None:
            measured["train/reward_mean"] = float(reward)  # type: ignore[arg-type]
        if self._job.config.trainer.missing_logprobs == "recompute" and "logprobs" in self._needs:
            measured["train/recomputed_rows"] = float(kept["logprobs"].null_count())
            kept = without_missing_logprobs(kept)
        return examples(kept, needs=self._needs, step=step), measured

    def _at_temperature(self, rows: pl.DataFrame) -> pl.DataFrame:
        return at_temperature(
            rows,
            run_id=self._job.run_id,
            run_temperature=self._temperature,
            likelihoods=self._algorithm.likelihoods_at,
        )

    def _treated(self, rows: pl.DataFrame, step: int) -> pl.DataFrame:
        """Let the operators treat a step's rows, and note why they leave some out.

        These stay in the step, so that statistics of groups see whole groups, and weigh nothing.
        """
        if not self._chain:
            return rows.with_columns(left_out=pl.lit(None, pl.String))
        rows, made = apply_before_train(self._chain, rows)
        attempt = self._job.step_id(step)
        record(self._job.store, made, lineage_id=attempt, drops=True)
        return rows

    def _usable(self, rows: pl.DataFrame, kept: pl.Series) -> pl.Series:
        """Tell which of the rows that are kept can be trained on; of a pair both or none."""
        good = self._why_not(rows).is_null() & kept
        return preferences.whole(rows, good) if self._are_pairs else good

    def _why_not(self, rows: pl.DataFrame) -> pl.Series:
        why = untrainable(rows, vocabulary=self._vocabulary, max_length=self._max_length)
        return why_foreign(rows).fill_null(why)

    def _note_untrainable(self, rows: pl.DataFrame, step: int) -> None:
        """Store why rows are drawn with weight 0 that the model cannot take."""
        bad = rows.select("experience_id", error=self._why_not(rows)).drop_nulls("error").unique()
        if bad.is_empty():
            return
        attempt = self._job.step_id(step)
        made = bad.select(
            "experience_id", "error", operator=pl.lit("train"), lineage_id=pl.lit(attempt)
        )
        self._job.store.append("operator_errors", made.sort("experience_id"))

    def _tokenized(self, rows: pl.DataFrame) -> pl.DataFrame:
        documents = self._algorithm.documents
        return tokenize(
            self._check(rows), self._tokenizer, documents=documents, are_pairs=self._are_pairs
        )

    def _with_units(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Add which rows belong together, where they come in pairs."""
        if not self._are_pairs:
            return rows.with_columns(preference_id=pl.lit(None, pl.String))
        return rows.with_columns(unit=preferences.places(rows))

    @cached_property
    def _described(self) -> str:
        return self.sampler.describe()

    def _record(self, step: int, rows: pl.DataFrame, draw: Draw) -> None:
        """Write down the step's rows, before they are trained on."""
        tables = [{"name": name, "version": v} for name, v in draw.drawn_from.items()]
        tokenizer = self._check.digest if rows["was_text"].any() else None
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
                preference_id="preference_id",
                replaced="replaced",
            ),
        )
