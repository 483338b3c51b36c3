"""Writing values of which the newest counts: those that came out as before are left out."""

from collections.abc import Mapping, Sequence

import polars as pl

from ...store import Appended, Store
from .. import sink as sinks
from .appending import Comparing

_OF_RUN = r"\.\d{8}T\d{12}-[0-9a-f]{8}$"
"""What stands behind the version of a value that came out otherwise: the pipeline run."""


class Newest(Comparing):
    """Appends values that came out otherwise than the same maker's newest ones.

    Those have the pipeline run behind their version, since stored rows do not change.
    """

    def __init__(
        self, store: Store, table: str, lineage_id: str | None, *, by: Sequence[str], version: str
    ) -> None:
        """Compare `by` the id, the name and `maker`: the `version` without a pipeline run."""
        super().__init__(store, table, lambda rows: rows)
        self._lineage_id, self._by, self._column = lineage_id, [*by, "maker"], version
        self._content = ("value", "text" if table in sinks.VALUES else "detail")
        self.learn()

    def new(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the values that the same maker did not say before."""
        if not self._known.height:
            return self._as_rows(rows.with_columns(pl.col("maker").alias(self._column)))
        both = rows.with_columns(*_digests(self._by), now=self._digest)
        both = both.join(self._known, on=["digest", "digest_2"], how="left", maintain_order="left")
        is_first = pl.col("known").is_null()
        version = pl.when(is_first).then("maker").otherwise(self._again)
        new = both.filter(~pl.col("now").eq_missing(pl.col("known")))
        return self._as_rows(new.with_columns(version.alias(self._column)))

    def learn(self) -> None:
        """Read the newest values, by digests of their ids, names and makers."""
        latest = self._latest(self._wanted)
        self._known = latest.select(*_digests(self._by), known=self._digest).collect()

    @property
    def _wanted(self) -> pl.Expr:
        """Which stored rows may be compared."""
        return pl.lit(True)  # noqa: FBT003

    @property
    def _digest(self) -> pl.Expr:
        return pl.struct(self._content).hash(0)

    @property
    def _again(self) -> pl.Expr:
        return pl.format("{}.{}", "maker", pl.lit(self._lineage_id))

    def _latest(self, wanted: pl.Expr, *beside: str) -> pl.LazyFrame:
        """Return the newest value of each id, name and maker."""
        newest = pl.col(*self._content, *beside).sort_by("created_at", self._column).last()
        maker = pl.col(self._column).str.replace(_OF_RUN, "")
        rows = self._store.scan(self._table).filter(wanted).with_columns(maker=maker)
        return rows.group_by(self._by).agg(newest)

    def _as_rows(self, values: pl.DataFrame) -> pl.DataFrame:
        return values.select(*self._by[:2], self._column, *self._content)


class Scores(Newest):
    """Appends verdicts that depend on other rows: a rank in a group that grew is another one."""

    def __init__(self, store: Store, lineage_id: str | None) -> None:
        by = ("experience_id", "scorer")
        super().__init__(store, "scores", lineage_id, by=by, version="scorer_version")

    def put(self, rows: pl.DataFrame) -> None:
        """Append the verdicts of a part."""
        scores = sinks.as_scores(rows).rename({"scorer_version": "maker"})
        if "detail" not in scores.columns:
            scores = scores.with_columns(detail=pl.lit(None, pl.String))
        self.add(scores.with_columns(pl.col("value").cast(pl.Float64)))


class Values(Newest):
    """Appends one row a value that is not NULL, made by operators that derive.

    A value that did not come out this time, of a row that was read again, is taken back by a NULL.
    """

    def __init__(
        self,
        store: Store,
        table: str,
        made_by: Mapping[str, str],
        lineage_id: str | None,
        *,
        before: tuple[pl.Series, pl.Series] | None = None,
    ) -> None:
        self._made_by = made_by
        self._before = before if before is not None and len(before[1]) else None
        self._put: list[pl.DataFrame] = []
        by = (sinks.VALUES[table], "name")
        super().__init__(store, table, lineage_id, by=by, version="version")

    def put(self, rows: pl.DataFrame) -> None:
        """Append the values of a part."""
        made = [
            sinks.values(rows, self._by[0], name, version)
            for name, version in self._made_by.items()
            if name in rows.columns
        ]
        values = pl.concat(made)
        if self._before is not None:
            self._put.append(values.select(_digests(self._by)))
        self.add(values)

    def done(self) -> Appended:
        """Take back what does not hold any more, and return what was appended."""
        gone = self._gone()
        if gone.height:
            none = {"value": pl.lit(None, pl.Float64), "text": pl.lit(None, pl.String)}
            self.append(self._as_rows(gone.with_columns(version=self._again, **none)))
        return super().done()

    def _gone(self) -> pl.DataFrame:
        """Return what earlier runs said of rows that were read, and this one did not."""
        if self._before is None:
            return pl.DataFrame()
        ids, runs = self._before
        is_asked = pl.col(self._by[0]).is_in(ids.implode())
        stood = self._latest(self._wanted & is_asked, "lineage_id").collect()
        stood = stood.filter(
            pl.col("lineage_id").is_in(runs.implode()),
            pl.any_horizontal(pl.col("value", "text").is_not_null()),
            pl.col("maker") == pl.col("name").replace_strict(self._made_by),
        ).with_columns(_digests(self._by))
        keys = ["digest", "digest_2"]
        return stood.join(pl.concat([stood[:0].select(keys), *self._put]), on=keys, how="anti")

    @property
    def _wanted(self) -> pl.Expr:
        return pl.col("name").is_in(list(self._made_by))

    def _as_rows(self, values: pl.DataFrame) -> pl.DataFrame:
        return super()._as_rows(values).with_columns(lineage_id=pl.lit(self._lineage_id))


def _digests(names: Sequence[str]) -> tuple[pl.Expr, pl.Expr]:
    """Return 128 bits that stand for a row's key: of millions, no two are alike by chance."""
    key = pl.struct(names)
    return key.hash(0).alias("digest"), key.hash(1).alias("digest_2")
