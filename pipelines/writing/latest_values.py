"""Write values of which the newest counts; unchanged values are left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from ...store import Appended, Store
from ...store.withdrawals import is_gone, kept, taken_back
from .. import sink as sinks
from .append import Comparing, Maker

_OF_RUN = r"\.\d{8}T\d{12}-[0-9a-f]{8}$"
"""The pipeline run after the version of a value that differs from an earlier one."""


@dataclass(frozen=True)
class Before:
    """Values of earlier runs of a pipeline that are withdrawn unless they are set again."""

    runs: pl.Series
    """These runs' values of rows that were read now, or left the source since."""
    ids: pl.Series
    """Those rows."""
    replaced: pl.Series
    """These runs' values of any row: everything was read, and they are of an older definition."""
    every_name: bool = False
    """Whether values with names that the pipeline no longer derives are withdrawn too."""


class Newest(Comparing):
    """Appends values that differ from the same maker's newest ones.

    Their version ends in the pipeline run, since stored rows never change.
    """

    def __init__(
        self, store: Store, table: str, maker: Maker, *, by: Sequence[str], version: str
    ) -> None:
        """Compare `by` the id, the name and `maker`: the `version` without a pipeline run."""
        super().__init__(store, table, maker, lambda rows: rows)
        self._by, self._column = [*by, "maker"], version
        self._content = ("value", "text" if table in sinks.VALUES else "detail")
        self.learn()

    def new(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the values that the same maker did not say before."""
        if not self._known.height:
            return self._as_rows(rows.with_columns(pl.col("maker").alias(self._column)))
        both = self._with_known(rows)
        version = pl.when(pl.col("known").is_null()).then("maker").otherwise(self._again)
        return self._as_rows(both.filter(~_IS_SAID).with_columns(version.alias(self._column)))

    def learn(self) -> None:
        """Read the newest values, by digests of their ids, names and makers."""
        # digests, not values: those of a whole table are in memory while parts are compared
        latest = self._latest(self._wanted, self._by, self._column, "counts")
        self._known = latest.select(
            *_digests(self._by), "counts", known=self._digest, stored=self._column
        ).collect()

    def leave(self, rows: pl.DataFrame, new: pl.DataFrame) -> None:
        """Count the values that the same maker said before."""
        del new
        said = self._with_known(rows).filter(_IS_SAID) if self._known.height else rows[:0]
        if said.height:
            self.skip(
                said.select(pl.concat_str(*self._by[:2], "stored", separator=" ")).to_series()
            )

    def _with_known(self, rows: pl.DataFrame) -> pl.DataFrame:
        both = rows.with_columns(*_digests(self._by), now=self._digest)
        return both.join(self._known, on=["digest", "digest_2"], how="left", maintain_order="left")

    @property
    def _wanted(self) -> pl.Expr:
        """Which stored rows may be compared."""
        return pl.lit(True)  # noqa: FBT003

    @property
    def _digest(self) -> pl.Expr:
        return pl.struct(self._content).hash(0)

    @property
    def _again(self) -> pl.Expr:
        return pl.format("{}.{}", "maker", pl.lit(self._maker.lineage_id))

    def _latest(self, wanted: pl.Expr, by: Sequence[str], *more: str) -> pl.LazyFrame:
        """Return the newest value of each id, name and maker: one that counts, if there is any."""
        order = ("counts", "created_at", self._column)
        names = [n for n in dict.fromkeys([*self._content, *more]) if n not in by]
        newest = pl.col(names).sort_by(order).last()
        maker = pl.col(self._column).str.replace(_OF_RUN, "")
        rows = self._store.scan(self._table).filter(wanted)
        rows = rows.with_columns(maker=maker, counts=~self._is_gone)
        return rows.group_by(by).agg(newest)

    @property
    def _is_gone(self) -> pl.Expr:
        gone = taken_back(self._store.scan("withdrawals").collect())
        if not gone:
            return pl.lit(False)  # noqa: FBT003
        both = kept(self._store.scan("members").collect(), self._table, gone)
        return is_gone(self._table, gone, both)

    def _as_rows(self, values: pl.DataFrame) -> pl.DataFrame:
        return values.select(*self._by[:2], self._column, *self._content)


class Scores(Newest):
    """Appends verdicts that depend on other rows, such as ranks, which change as groups grow."""

    def __init__(self, store: Store, maker: Maker) -> None:
        by = ("experience_id", "scorer")
        super().__init__(store, "scores", maker, by=by, version="scorer_version")

    def put(self, rows: pl.DataFrame) -> None:
        """Append the verdicts of a part."""
        scores = sinks.as_scores(rows).rename({"scorer_version": "maker"})
        if "detail" not in scores.columns:
            scores = scores.with_columns(detail=pl.lit(None, pl.String))
        self.add(scores.with_columns(pl.col("value").cast(pl.Float64)))


class Values(Newest):
    """Appends one row a value that is not NULL, made by operators that derive.

    A value that is not set this time, of a row that was read again or by an older definition, is
    withdrawn by a NULL.
    """

    def __init__(
        self,
        store: Store,
        table: str,
        made_by: Mapping[str, str],
        maker: Maker,
        *,
        before: Before | None = None,
    ) -> None:
        self._made_by = made_by
        self._before = before
        self._put: list[pl.DataFrame] = []
        by = (sinks.VALUES[table], "name")
        super().__init__(store, table, maker, by=by, version="version")

    def put(self, rows: pl.DataFrame) -> None:
        """Append the values of a part."""
        made = [
            sinks.values(rows, self._by[0], name, version)
            for name, version in self._made_by.items()
            if name in rows.columns
        ]
        values = pl.concat(made)
        if self._before is not None:
            self._put.append(values.select(_digests(self._by[:2])))
        self.add(values)

    def done(self) -> Appended:
        """Take back what does not hold any more, and return what was appended."""
        gone = self._gone()
        if gone.height:
            none = {"value": pl.lit(None, pl.Float64), "text": pl.lit(None, pl.String)}
            self.append(self._as_rows(gone.with_columns(version=self._again, **none)))
        return super().done()

    def _gone(self) -> pl.DataFrame:
        """Return the values that count, that earlier runs said, and that this one did not."""
        before = self._before
        if before is None:
            return pl.DataFrame()
        key = self._by[:2]
        wanted = pl.lit(True) if before.every_name else self._wanted  # noqa: FBT003
        stood = self._latest(wanted, key, "lineage_id", "maker", "counts").collect()
        by_run = pl.col("lineage_id").is_in(before.runs.implode())
        is_read = pl.col(key[0]).is_in(before.ids.implode())
        stood = stood.filter(
            (by_run & is_read) | pl.col("lineage_id").is_in(before.replaced.implode()),
            pl.any_horizontal(pl.col("value", "text").is_not_null()),
            "counts",
        )
        made_by = pl.col("name").replace_strict(self._made_by, default=None, return_dtype=pl.String)
        stood = stood.with_columns(*_digests(key), maker=pl.coalesce(made_by, "maker"))
        keys = ["digest", "digest_2"]
        return stood.join(pl.concat([stood[:0].select(keys), *self._put]), on=keys, how="anti")

    @property
    def _wanted(self) -> pl.Expr:
        return pl.col("name").is_in(list(self._made_by))


_IS_SAID = pl.col("counts").fill_null(value=False) & pl.col("now").eq_missing(pl.col("known"))
"""Whether a stored value that counts says the same."""


def _digests(names: Sequence[str]) -> tuple[pl.Expr, pl.Expr]:
    """Return 128 bits that stand for a row's key: of millions, no two are alike by chance."""
    key = pl.struct(names)
    # in memory only, like all hashes of Polars
    return key.hash(0).alias("digest"), key.hash(1).alias("digest_2")
