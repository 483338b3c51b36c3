"""Draw the rows of each training step, wait for them, and record them."""

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import polars as pl

from ...store.errors import ConfigError, StarvedError
from ...store.ids import combine
from ...store.replay import Draw, Mixture, Sampler, Supply
from ..algorithms import Algorithm
from ..losses.batch import Examples
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
from .batch_rows import BatchRows
from .priority_updates import Priorities

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ..models.images import Images

_TABLES = pl.List(pl.Struct({"name": pl.String, "version": pl.Int64}))


class TrainDataLoader:
    """Draws the rows of each training step, and records them before they are used."""

    def __init__(
        self,
        job: Job,
        algorithm: Algorithm,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        vocabulary: int | None,
        max_length: int | None,
        experts: tuple[int, int, int] | None = None,
        stop: threading.Event,
        images: "Images | None" = None,
    ) -> None:
        config = job.config
        self._job, self._algorithm, self._stop = job, algorithm, stop
        self._online = config.explorer is not None
        # An offline run trains on what was stored when it began, whatever is imported later.
        self._source = job.store if self._online else pinned(job, "rows")
        self.sampler = self._sampler()
        self._horizon = UnitSchedule(config)
        check_sides(self._source, config)
        self._watch = Watch(job)
        self._recorded: dict[int, pl.DataFrame] = {}
        self._rows = BatchRows(
            job,
            algorithm,
            tokenizer,
            vocabulary=vocabulary,
            max_length=max_length,
            images=images,
            experts=experts,
        )
        self._key = "preference_id" if algorithm.unit == "pair" else "experience_id"
        self._trained: pl.DataFrame | None = None
        expression = config.trainer.priority_update
        self._priorities = Priorities(job, expression) if expression is not None else None

    def _sampler(self) -> RowSampler:
        config, algorithm = self._job.config, self._algorithm
        if self._online or config.trainer.priority_update is None:
            return sampler(self._source, config, algorithm)
        # Pinned, except for the tables with the priorities that the run itself writes.
        then = self._source.versions()
        until = {
            name: then[name] for name in then if name not in ("experience_values", "job_events")
        }
        return sampler(self._job.store, config, algorithm, until=until)

    def total_steps(self) -> int:
        """Return the number of steps: as configured, or until all rows are used up."""
        trainer = self._job.config.trainer
        check_runs(self._job.store, trainer.sampler.mixed or {})
        if self._online:
            assert trainer.steps is not None, "`RunConfig` requires it with an explorer"
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
                "`trainer.steps` is missing: rows of several sources, or drawn with replacement, "
                "are never used up; set it"
            )
        a_step = min(trainer.batch_size, supply.fresh)  # a step draws each row at most once
        return -(-supply.fresh * trainer.max_uses // a_step)

    def resume(self, start_step: int) -> None:
        """Restore the sampler from `draws`: the steps of a killed attempt are drawn as recorded."""
        run = f"run_id = '{self._job.run_id}'"
        drawn = self._job.store.sql(
            f"SELECT {self._key} AS id, source FROM draws_current "
            f"WHERE {run} AND step < {start_step} ORDER BY step, position"
        ).pl()
        self.sampler.restore(drawn["id"].to_list(), sources=drawn["source"].to_list())
        # Of several attempts at a step, only the last one's draw counts.
        again = self._job.store.sql(
            f"SELECT step, {self._key} AS id, source, weight, drawn_from FROM draws WHERE {run} "
            f"AND step >= {start_step} "
            "QUALIFY attempt = max(attempt) OVER (PARTITION BY step) ORDER BY step, position"
        ).pl()
        parts = again.partition_by("step", maintain_order=True)
        self._recorded = {part["step"][0]: part for part in parts}

    def next_batch(self, step: int) -> tuple[Examples, dict[str, float]]:
        """Return the rows of a step and the metrics of its data, waiting for an explorer's rows.

        Raises StarvedError if they do not come in time, or can never come.
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
        rows = self._rows.prepare(self.sampler, draw, step)
        # Before the rows are used: a run that is killed now trains on the same rows again.
        self._record(step, rows, draw)
        self._trained = rows.filter("is_trainable")
        return self._rows.to_examples(rows, step)

    def record_priorities(self, step: int, surprise: Sequence[float]) -> None:
        """Store the new priorities of a step's rows, if the run has a `priority_update`.

        `surprise` is that of the rows of `next_batch`, in their order.
        """
        if self._priorities is not None and self._trained is not None and surprise:
            rows = self._trained.with_columns(surprise=pl.Series(surprise, dtype=pl.Float64))
            self._priorities.store(rows, step=step)

    def held_out(self, where: str, *, rows_at_once: int = 256) -> list[Examples]:
        """Return the stored rows that match a condition, for evaluation only."""
        sampler = Sampler(
            self._source,
            where=where,
            table=self._algorithm.table,
            with_columns=self._job.config.trainer.side_columns,
        )
        parts = []
        # Each row is drawn once, since the default strategy does not replace: the loop ends.
        while (supply := sampler.supply(1, 0)).fresh:
            draw = sampler.draw(min(rows_at_once, supply.fresh), step=0, policy_version=0)
            assert draw is not None, "the supply says that there are as many"
            parts.append(self._rows.held_out(sampler, draw))
        if not any(len(part) for part in parts):
            raise ConfigError(
                f"no stored {self._algorithm.unit} matches `trainer.eval_where`: {where}"
            )
        return parts

    def _wait(self, step: int) -> Draw:
        schedule = self._job.config.schedule
        return self._job.store.wait_for(
            lambda: self._look(step),
            tables=("experiences", "job_events"),  # the latter shows that the explorer failed
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
        # Only without a draw: rows that an explorer stored before it failed are still trained on.
        if draw is None:
            self._watch.check("explore")
        return draw

    def _size(self, step: int) -> int:
        """Return how many units an online step draws, 0 while some of its rows are not stored.

        In a replay, rows that went stale before they were drawn often enough may leave less than a
        batch. Rows that are stored later must not fill it, or the step could not be drawn again.
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
        """Draw from stored rows; the last step may be smaller."""
        supply = self._supply(step)
        size = supply.need
        if isinstance(self.sampler, Sampler) and supply.draws is not None:
            size = min(size, supply.draws)
        draw = self._draw(step, size) if size else None
        if draw is None:
            raise StarvedError(
                f"step {step} of run `{self._job.run_id}` can never be drawn: {supply}; this run "
                "has no explorer: lower `trainer.steps`, or raise `trainer.max_uses`"
            )
        return draw

    @cached_property
    def _described(self) -> str:
        return self.sampler.describe()

    def _record(self, step: int, rows: pl.DataFrame, draw: Draw) -> None:
        """Append the step's rows to `draws`."""
        tables = [{"name": name, "version": v} for name, v in draw.drawn_from.items()]
        tokenizer = self._rows.token_check.digest if rows["was_text"].any() else None
        self._job.store.append(
            "draws",
            rows.select(
                run_id=pl.lit(self._job.run_id),
                attempt=pl.lit(self._job.attempt),
                step=pl.lit(step),
                # `resume` and `rlake verify` restore the rows in this order.
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
