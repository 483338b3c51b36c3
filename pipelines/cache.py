"""Cache of costly operators: results are looked up by the values that the operator reads.

An operator that needs groups is applied again to a group whose rows or values have changed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

import numpy as np
import polars as pl

from ..operators import Applied, Batches, Explained, Operator, Rows
from ..operators.invariants import id_column
from ..operators.scope import places_by_group
from ..operators.source_digest import digest
from ..store import Store
from ..store.ids import combine, content_id, row_digests
from .cache_tables import DIGEST, LIMIT_BYTES, CacheTables
from .running.partition import cut

_AT_ONCE = 1024
"""Rows that are processed between two checks whether results are due to be stored."""
_KEEP_SECONDS = 1.0
"""Seconds of work after which results are stored: about what a killed run loses."""
_KEEP, _REASON, _ERROR = "is_kept", "reason_it_went", "error_it_raised"
_GROUP = "group_id"
_KINDS = ("clean", "derive", "filter", "prioritize")


class OperatorCache:
    """Applies operators, and caches the results of costly ones. Threads may share it."""

    def __init__(self, store: Store, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self.tables = CacheTables(store, limit_bytes=limit_bytes)
        """The tables with the results."""

    def apply(
        self, op: Operator, rows: pl.DataFrame, *, max_failed: int | None = None
    ) -> tuple[Applied, int]:
        """Apply an operator; return its result, and the number of rows found in the cache.

        Only operators that are costly are looked up, and they get only the columns that they read.
        Equal values are processed once. Errors, and the results of a group with an error, are not
        cached. Raises what `Operator.apply` raises.
        """
        if not is_costly(op) or not rows.height:
            return op.apply(rows, max_failed=max_failed), 0
        op.check_columns(rows.lazy())
        # The digests are of the values before the operator runs: a clean replaces the very column
        # that it reads, and a later run looks its result up by the old value.
        asked, key = _Asked(op, rows), cache_key(op, rows.schema)
        found = self.tables.find(key, asked.digests, asked.answer)
        made, errors = [found], [pl.DataFrame(schema={DIGEST: pl.String, _ERROR: pl.String})]
        with self._kept(key, str(op), made) as keep:
            for part in asked.todo(found):
                failed = sum(e[_ERROR].count() for e in errors)
                left = None if max_failed is None else max_failed - failed
                good, bad = asked.treat(part, max_failed=left)
                made.append(good)
                errors.append(bad)
                keep()
        is_found = asked.digests.is_in(found[DIGEST].implode())
        return asked.applied(pl.concat([*made, *errors], how="diagonal")), int(is_found.sum())

    @contextmanager
    def _kept(
        self, key: str, operator: str, made: list[pl.DataFrame]
    ) -> Iterator[Callable[[], None]]:
        """Store results that are appended to `made` regularly, and at the end, also on errors."""
        kept, since = len(made), monotonic()

        def keep(*, now: bool = False) -> None:
            nonlocal kept, since
            if made[kept:] and (now or monotonic() - since > _KEEP_SECONDS):
                self.tables.add(key, operator, pl.concat(made[kept:]))
                kept, since = len(made), monotonic()

        try:
            yield keep
        finally:
            keep(now=True)

    def count(self, op: Operator, given: pl.Schema) -> int:
        """Return the number of cached results of an operator."""
        return self.tables.count(cache_key(op, given)) if is_costly(op) else 0


def is_costly(op: Operator) -> bool:
    """Return whether an operator is slow, and its result depends only on what it reads.

    Computing expressions and SQL is faster than looking them up.

    >>> from rlake.operators import keep
    >>> is_costly(keep(where="reward > 0"))
    False
    """
    body = op.body.rows if isinstance(op.body, Explained) else op.body
    seen = "group" if isinstance(body, Batches) and body.by_group else "row"
    is_ours_to_keep = op.kind in _KINDS and op.scope == seen and bool(op.reads)
    is_slow = isinstance(body, Rows) or (isinstance(body, Batches) and not body.is_quick)
    return is_slow and is_ours_to_keep and not op.reads_all


def _read(op: Operator, given: Iterable[str]) -> list[str]:
    """Return the columns that an operator's result may depend on."""
    more = {*op.may_read, _GROUP} if op.scope == "group" else op.may_read
    return list(dict.fromkeys([*op.reads, *(name for name in given if name in more)]))


def cache_key(op: Operator, given: pl.Schema) -> str:
    """Return the cache key of a costly operator: its function, and the types that it reads."""
    body = op.body.rows if isinstance(op.body, Explained) else op.body
    assert isinstance(body, Batches | Rows), "only these are costly"
    reads = {name: str(given[name]) for name in _read(op, given)}
    makes = {name: str(kind) for name, kind in body.columns.items()}
    return content_id(op.fingerprint, digest(body.function), reads, makes, length=32)


class _Asked:
    """Rows to apply a costly operator to: their digests, and the results."""

    def __init__(self, op: Operator, rows: pl.DataFrame) -> None:
        self._op, self._rows, self._id = op, rows, id_column(rows.columns, op)
        read = _read(op, rows.columns)
        given = (self._id, *read, *(n for n in op.writes if n in rows.columns))
        self._given = rows.select(*dict.fromkeys(given))
        table = rows.select(*read).to_arrow(compat_level=pl.CompatLevel.oldest())
        digests, self._unit = row_digests(table), pl.col(DIGEST)
        if op.scope == "group":
            groups = rows[_GROUP] if _GROUP in rows.columns else [""] * rows.height
            digests = _digests_within(places_by_group(groups), digests)
            self._unit = self._unit.str.split(":").list.first()
        self.digests = pl.Series(DIGEST, digests, pl.String)
        after = op.columns_after(self._given.schema)
        marks = {_KEEP: pl.Boolean(), _REASON: pl.String()} if op.kind == "filter" else {}
        written = {name: after[name] for name in op.writes}
        self.answer = pl.Schema({DIGEST: pl.String(), **written, **marks})
        """The columns of a cached result."""

    def todo(self, found: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Yield one row for each digest without a result, with whole groups."""
        rows = self._given.with_columns(self.digests)
        rows = rows.filter(~pl.col(DIGEST).is_in(found[DIGEST].implode()))
        # one row for equal values: a request to a judge may cost money
        rows = rows.unique(DIGEST, keep="first", maintain_order=True)
        units = rows.select(self._unit).to_series()
        for places in cut(np.ones(rows.height), part_bytes=_AT_ONCE, groups=units):
            yield rows[places]

    def treat(
        self, part: pl.DataFrame, *, max_failed: int | None
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Apply the operator; return the results to cache, and those of units with an error."""
        applied = self._op.apply(part.drop(DIGEST), max_failed=max_failed)
        written = applied.rows.select(self._id, *self._op.writes)
        parts = [applied.failed.rename({"error": _ERROR}), written]
        if self._op.kind == "filter":
            parts[1] = written.with_columns(pl.lit(True).alias(_KEEP))  # noqa: FBT003
            parts.append(applied.dropped.rename({"reason": _REASON}))
        made = part.select(self._id, DIGEST)
        for one in parts:
            made = made.join(one, on=self._id, how="left", maintain_order="left")
        if self._op.kind == "filter":
            made = made.with_columns(pl.col(_KEEP).fill_null(value=False))
        # with a cached part of a group, the next run would ask about the rest without it
        is_good = pl.col(_ERROR).is_null().all().over(self._unit)
        good, bad = made.filter(is_good), made.filter(~is_good)
        return good.select(self.answer.names()), bad.select(*self.answer.names(), _ERROR)

    def applied(self, answers: pl.DataFrame) -> Applied:
        """Return the result for every row, by its digest."""
        found = self._given.select(self._id).with_columns(self.digests)
        found = found.join(answers, on=DIGEST, how="left", maintain_order="left")
        failed = found.filter(pl.col(_ERROR).is_not_null())
        failed = failed.select(self._id, pl.col(_ERROR).alias("error"))
        rows = self._rows.with_columns(self._written(found))
        rows = rows.select(self._op.columns_after(self._rows.schema).names())
        if self._op.kind != "filter":
            none = failed.head(0).rename({"error": "reason"})
            return Applied(rows, none, failed)
        is_kept = found[_KEEP].fill_null(value=False)
        why = pl.coalesce(_ERROR, _REASON).alias("reason")
        return Applied(rows.filter(is_kept), found.filter(~is_kept).select(self._id, why), failed)

    def _written(self, answers: pl.DataFrame) -> list[pl.Series]:
        written = [answers[name] for name in self._op.writes]
        if self._op.kind != "clean":
            return written
        is_good = answers[_ERROR].is_null()  # a clean leaves a row on which it fails unchanged
        return [values.zip_with(is_good, self._rows[values.name]) for values in written]


def _digests_within(groups: Sequence[Sequence[int]], digests: Sequence[str]) -> list[str]:
    # each row's digest covers its whole group, so that one changed row makes all of them new
    made = [""] * len(digests)
    for places in groups:
        ordered = sorted(places, key=digests.__getitem__)
        whole = combine(digests[place] for place in ordered)
        for number, place in enumerate(ordered):
            made[place] = f"{whole}:{number}"
    return made
