"""Prepare the rows of a draw for training: five functions, whose order matters.

`read` -> `apply_operators` -> `compute_advantages` -> `tokenized` -> `weighted`. Each one's comment
says why it comes where it does.
"""

import logging
from typing import TYPE_CHECKING

import polars as pl

from ...pipelines import expectations
from ...pipelines.inline import STORED, apply_before_train, record, trainer_chain
from ...store.ids import row_digests
from ...store.replay import Draw, Sampler
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
from ..runs.job import Job
from ..schedule.samplers import RowSampler
from . import preferences
from .lag_metrics import lags
from .row_tokens import TokenCheck, tokenize, why_foreign, with_media

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ..models.images import Images

_log = logging.getLogger(__name__)

_COLUMNS = ("experience_id", "run_id", "group_id", "policy_version", *FACTS)
_COLUMNS += ("tools", "tokenizer", "source", "drop_reason", "created_at")


class BatchRows:
    """Turns draws into the examples of an algorithm."""

    def __init__(
        self,
        job: Job,
        algorithm: Algorithm,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        vocabulary: int | None,
        max_length: int | None,
        images: "Images | None" = None,
        experts: tuple[int, int, int] | None = None,
    ) -> None:
        """`experts`: see `examples`."""
        trainer, explorer = job.config.trainer, job.config.explorer
        self._job, self._algorithm, self._tokenizer = job, algorithm, tokenizer
        self._vocabulary, self._max_length, self._images = vocabulary, max_length, images
        self._experts = experts
        self._temperature = explorer.sampling.temperature if explorer else 1.0
        self._are_pairs = algorithm.unit == "pair"
        self.token_check = TokenCheck(tokenizer, trainer.foreign_tokens)
        self._advantage = algorithm.advantage()
        self._chain = trainer_chain(
            trainer.operators,
            trainer.side_columns,
            credit=self._advantage,
            grouped=algorithm.grouped,
        )
        # with a teacher in the trainer, rows need not bring its log-probs
        computed = {"teacher_logprobs"} if trainer.teacher else set()
        self._needs = algorithm.needs - computed
        used = {*algorithm.needs, *(self._advantage.reads if self._advantage else ())}
        used |= set() if experts is None else {"routed_experts"}
        stored = [name for name in STORED if name in used]
        expected = [n for one in job.config.expect.experiences for n in one.columns(STORED)]
        columns = [*_COLUMNS, *stored, *self._chain.reads(STORED), *expected]
        self._columns = list(dict.fromkeys(columns))

    def prepare(self, sampler: RowSampler, draw: Draw, step: int) -> pl.DataFrame:
        """Return the rows of a step, ready to be recorded; `is_trainable` marks those to train on.

        Also stores why operators left rows out, and why rows cannot be trained on.
        """
        rows = self.read(sampler, draw)
        self.check_expected(rows, step)
        rows = self.apply_operators(rows, draw, step)
        rows = self.compute_advantages(rows)
        rows = self.tokenized(rows)
        return self.weighted(rows, step)

    def read(self, sampler: RowSampler, draw: Draw) -> pl.DataFrame:
        """Return the stored rows with their digests and side columns.

        Digests come first: `rlake verify` computes them again from the stored facts, so they must
        not see a reward that a side column replaces, nor what an operator changes.
        """
        rows = sampler.read(draw, self._columns)
        digests = pl.Series("digest", row_digests(rows.select(FACTS).to_arrow()))
        digests = digests.set(rows["created_at"].is_null(), ABSENT)
        rows = rows.with_columns(advantage=pl.lit(None, pl.Float64))
        return sampler.with_sides(draw, rows).with_columns(digests)

    def check_expected(self, rows: pl.DataFrame, step: int) -> None:
        """Check `expect.experiences`, as stored; JobError stops the run before the step's record.

        Before the operators, which may repair or leave out what is not as expected.
        """
        expected, job = self._job.config.expect.experiences, self._job
        if not expected:
            return
        checked = f"the rows of step {step} of run `{job.run_id}`"
        ids = {"run_id": job.run_id, "attempt": job.attempt, "step": step}
        found = expectations.check(job.store, expected, checked, rows=rows, **ids)
        for warning in expectations.enforce(found, checked, stopped="they are not trained on"):
            _log.warning("%s", warning)

    def apply_operators(self, rows: pl.DataFrame, draw: Draw, step: int) -> pl.DataFrame:
        """Run `trainer.operators`, then add what the draw says of each row.

        Operators run before the advantages because they may change rewards. A row that they filter
        (`left_out` says why) stays in the step with weight 0, so that the statistics of its group
        cover the whole group. They see stored and side columns only, as `trainer_chain` checked.
        """
        ours = rows.select("replaced", "digest")
        rows = rows.drop(ours.columns)
        if self._chain:
            rows, result = apply_before_train(self._chain, rows)
            record(self._job.store, result, lineage_id=self._job.step_id(step), drops=True)
        else:
            rows = rows.with_columns(left_out=pl.lit(None, pl.String))
        return rows.with_columns(
            *ours.get_columns(),
            is_expert=pl.col("source") == "expert",
            # a number per group of the step, since tensors hold no text
            group=pl.col("group_id").rank("dense"),
            weight=pl.Series(draw.weights),
            epoch=pl.Series(draw.epochs),
            source=pl.Series(list(draw.sources), dtype=pl.String),
        )

    def compute_advantages(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Set the advantages, then drop the rows that were only read for their group's statistics.

        Those rows must not leave earlier, or the mean of a group would depend on which of its rows
        were drawn.
        """
        if self._advantage is not None:
            # the streaming engine adds up in another order, and a resumed run must be bit-identical
            rows = self._advantage(rows.lazy()).collect(engine="in-memory")
        return rows.filter("allowed")

    def tokenized(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Add tokens, pairs, temperatures, and what imitating an expert needs.

        This comes after the advantages because tokenizing is what costs, and only rows that are
        trained on need it. An expert's missing log-probs become zeros, one per token, so they are
        filled in last.
        """
        rows = tokenize(
            self.token_check(rows),
            self._tokenizer,
            documents=self._algorithm.documents,
            are_pairs=self._are_pairs,
            images=self._images,
        )
        rows = rows.with_columns(with_media(rows, self._images))
        if self._are_pairs:
            rows = rows.with_columns(unit=preferences.places(rows))
        else:
            rows = rows.with_columns(preference_id=pl.lit(None, pl.String))
        rows = at_temperature(
            rows,
            run_id=self._job.run_id,
            run_temperature=self._temperature,
            likelihoods=self._algorithm.likelihoods_at,
        )
        return experts_to_imitate(rows) if self._algorithm.takes_experts else rows

    def weighted(self, rows: pl.DataFrame, step: int) -> pl.DataFrame:
        """Set `lag` and `is_trainable`, and weight 0 for rows that are not trained on.

        This comes last because only tokens show whether the model can take a row. Such rows stay in
        the frame: the table `draws` records every row of a step.
        """
        kept = rows["left_out"].is_null()
        if self._advantage is not None:
            kept &= rows["advantage"].is_not_null()
        why_not = self._why_not(rows)
        self._store_errors(rows["experience_id"], why_not.set(~kept, None), step)
        trainable = self._trainable(rows, kept, why_not)
        # versions of another run count that run's steps, so its rows have no lag
        is_own = pl.col("run_id") == self._job.run_id
        return rows.with_columns(
            weight=pl.when(trainable).then("weight").otherwise(0.0),
            lag=pl.when(is_own).then(step - 1 - pl.col("policy_version")),
            is_trainable=trainable,
        )

    def to_examples(self, rows: pl.DataFrame, step: int) -> tuple[Examples, dict[str, float]]:
        """Return the examples of prepared rows, and the metrics of the step's data."""
        trained = rows.filter("is_trainable")
        metrics = {
            "train/rows": float(trained.height),
            "train/untrainable_rows": float(rows.height - trained.height),
        }
        metrics |= lags(rows["lag"]) | self.token_check.counted(rows)
        if self._chain:
            metrics["train/filtered_rows"] = float(rows["left_out"].count())
        if self._advantage is not None:  # such as groups of equal rewards: they teach nothing
            metrics["train/zero_advantage_rows"] = float((trained["advantage"] == 0).sum())
        reward = rows["reward"].mean()
        if reward is not None:
            metrics["train/reward_mean"] = float(reward)  # type: ignore[arg-type]
        if self._job.config.trainer.missing_logprobs == "recompute" and "logprobs" in self._needs:
            # Counted before NaNs replace the missing ones: NaN is not NULL.
            metrics["train/recomputed_rows"] = float(trained["logprobs"].null_count())
            trained = without_missing_logprobs(trained)
        made = examples(trained, needs=self._needs, step=step, experts=self._experts)
        return made, metrics

    def held_out(self, sampler: Sampler, draw: Draw) -> Examples:
        """Return the rows of a draw as examples that are only evaluated: no operators, no record.

        They are single rows, so an algorithm that compares groups gives them the advantage 0.
        """
        rows = sampler.read(draw, self._columns).with_columns(weight=pl.lit(1.0))
        labels = None if self._algorithm.grouped else self._advantage
        rows = rows.with_columns(advantage=pl.lit(None if labels else 0.0, pl.Float64))
        rows = sampler.with_sides(draw, rows).with_columns(is_expert=pl.col("source") == "expert")
        if labels is not None:
            rows = labels(rows.lazy()).collect(engine="in-memory")
        rows = self.tokenized(rows)
        kept = rows["advantage"].is_not_null()
        usable = rows.filter(self._trainable(rows, kept, self._why_not(rows)))
        return examples(usable, needs=self._needs, experts=self._experts)

    def _trainable(self, rows: pl.DataFrame, kept: pl.Series, why_not: pl.Series) -> pl.Series:
        """Return which of the kept rows can be trained on; both rows of a pair, or neither."""
        good = why_not.is_null() & kept
        return preferences.whole(rows, good) if self._are_pairs else good

    def _why_not(self, rows: pl.DataFrame) -> pl.Series:
        why = untrainable(rows, vocabulary=self._vocabulary, max_length=self._max_length)
        return why_foreign(rows).fill_null(rows["wrong_media"]).fill_null(why)

    def _store_errors(self, ids: pl.Series, why_not: pl.Series, step: int) -> None:
        """Store why the model cannot be trained on rows, in `operator_errors`."""
        if why_not.null_count() == len(why_not):
            return
        bad = pl.DataFrame({"experience_id": ids, "error": why_not}).drop_nulls("error").unique()
        # A row drawn twice has one error; `unique` returns rows in any order, so
        # they are sorted below.
        errors = bad.with_columns(
            operator=pl.lit("train"), lineage_id=pl.lit(self._job.step_id(step))
        )
        self._job.store.append("operator_errors", errors.sort("experience_id"))
