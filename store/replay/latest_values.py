"""The newest value of a side column for each experience, updated from new rows only."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from ..changes import ChangeFeed
from ..side_columns import SideColumn, superseded_steps, without_superseded
from ..store import Store
from .filters import hashed
from .growable_arrays import GrowableArray, Places
from .withdrawals import Withdrawn


class LatestValues:
    """Follows a side table; the newest row of an experience counts, as for `SideColumn`.

    Values that a superseded attempt of a trainer derived do not count.
    """

    def __init__(
        self, store: Store, column: SideColumn, *, until: Mapping[str, int] | None
    ) -> None:
        self.column = column
        self._store, self._until = store, until or {}
        self._superseded: _Superseded | None = None
        if column.table == "experience_values":
            self._superseded = _Superseded(store, until=until)
        self._withdrawn = Withdrawn(store, table=column.table, until=until)
        self._texts: dict[str, int] = {}
        self._clear()

    def _clear(self) -> None:
        columns = dict.fromkeys([*self.column.reads, *sorted(self._withdrawn.columns)])
        self._tail = ChangeFeed([*columns], until=self._until.get(self.column.table))
        self._hashes, self._values = GrowableArray(np.uint64), GrowableArray(np.float64)
        self._times = GrowableArray(np.int64)
        self._places = Places()

    @property
    def versions(self) -> dict[str, int]:
        """The versions of the tables that were read."""
        own = {self.column.table: self._tail.version} | self._withdrawn.versions
        return own if self._superseded is None else own | self._superseded.versions

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that it holds."""
        kept = (self._hashes, self._values, self._times, self._places)
        return sum(array.nbytes for array in kept)

    def refresh(self) -> np.ndarray:
        """Read what is new; return the hashes of the experiences whose value may have changed."""
        before = np.empty(0, np.uint64)
        others_count = self._withdrawn.follow()
        # old rows may count again, or no longer: all values are read again
        if (self._superseded is not None and self._superseded.refresh()) or others_count:
            # Experiences that no longer have a value changed as well.
            before = self._hashes.values
            self._clear()
        dataset = self._store.dataset(self.column.table)
        if not self._tail.moved(dataset):
            return before
        rows = self._tail.read(dataset)
        if self._tail.restarted:
            before = np.concatenate([before, self._hashes.values])
            # the tail has just read all rows: a new one would read them again
            tail = self._tail
            self._clear()
            self._tail = tail
        gone = self._withdrawn.of(rows)
        rows = rows if gone is None else rows.filter(pa.array(~gone))
        newest = self._newest(pl.DataFrame(pl.from_arrow(rows)))
        return np.unique(np.concatenate([before, self._note(newest)]))

    def of(self, hashes: np.ndarray) -> pl.Series:
        """Return the value of each experience, NULL where it has none."""
        places = self._places.find(self._hashes.values, hashes)
        # NaN stands for NULL: what is stored is finite
        values = np.full(len(hashes), np.nan)
        values[places >= 0] = self._values.values[places[places >= 0]]
        series = pl.Series(self.column.alias, values).fill_nan(None)
        if not self.column.is_text:
            return series
        texts = pl.Series(list(self._texts), dtype=pl.String)
        return texts.gather(series.cast(pl.UInt32)).alias(self.column.alias)

    def _newest(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return hash, value and time of the newest row of each experience among these."""
        column = self.column
        rows = rows.filter(column.chosen)
        if self._superseded is not None:
            rows = self._superseded.without(rows)
        order = ["created_at", column.tie]
        rows = rows.sort(order, nulls_last=False).unique("experience_id", keep="last")
        value = rows[column.value]
        if column.is_text:
            for text in value.drop_nulls().unique().sort():
                # A number for each different text, so that the arrays hold no objects.
                self._texts.setdefault(text, len(self._texts))
            value = value.replace_strict(self._texts, default=None, return_dtype=pl.Float64)
        return pl.DataFrame(
            {
                "hash": hashed(rows["experience_id"]),
                "value": value.cast(pl.Float64).fill_null(float("nan")),
                "time": rows["created_at"].cast(pl.Int64),
            }
        )

    def _note(self, newest: pl.DataFrame) -> np.ndarray:
        """Store values that are newer than the known ones; return the hashes of their rows."""
        hashes, values, times = (newest[c].to_numpy() for c in ("hash", "value", "time"))
        places = self._places.find(self._hashes.values, hashes)
        known = places >= 0
        newer = np.ones(len(hashes), np.bool_)
        newer[known] = times[known] >= self._times.values[places[known]]
        again = places[known & newer]
        self._values.values[again] = values[known & newer]
        self._times.values[again] = times[known & newer]
        self._hashes.extend(hashes[~known])
        self._values.extend(values[~known])
        self._times.extend(times[~known])
        return hashes[newer]


class SideValues:
    """The side columns of an index: conditions and priorities see the same value of a row."""

    def __init__(
        self,
        store: Store,
        columns: Sequence[SideColumn],
        *,
        read: Collection[str],
        until: Mapping[str, int] | None,
    ) -> None:
        """Follow the columns whose alias is in `read`; of others only versions are tracked."""
        self._store, self._until = store, until or {}
        self._latest = {
            c.alias: LatestValues(store, c, until=until) for c in columns if c.alias in read
        }
        others = [column.tables for column in columns if column.alias not in read]
        self._tables = set[str]().union(*others)
        self._versions: dict[str, int] = {}

    @property
    def versions(self) -> dict[str, int]:
        """The versions of the tables that side columns are read from."""
        followed = {name: v for one in self._latest.values() for name, v in one.versions.items()}
        return self._versions | followed

    @property
    def nbytes(self) -> int:
        """Bytes of all values that it holds."""
        return sum(latest.nbytes for latest in self._latest.values())

    def refresh(self) -> np.ndarray:
        """Read what is new; return the hashes of the experiences whose values may have changed."""
        for name in self._tables:
            newest = self._store.dataset(name).version
            self._versions[name] = min(newest, self._until.get(name, newest))
        changed = [latest.refresh() for latest in self._latest.values()]
        return np.unique(np.concatenate(changed)) if changed else np.empty(0, np.uint64)

    def of(self, hashes: np.ndarray, names: Sequence[str]) -> list[pl.Series]:
        """Return columns for these experiences, NULL where one has no value."""
        return [self._latest[name].of(hashes) for name in names]

    def join(self, rows: pa.Table, hashes: np.ndarray, names: Sequence[str]) -> pa.Table:
        """Return rows with these columns added."""
        for name, values in zip(names, self.of(hashes, names), strict=True):
            rows = rows.append_column(name, values.to_arrow())
        return rows


class _Superseded:
    """The step from which each attempt was superseded, as in the view `superseded_steps`."""

    def __init__(self, store: Store, *, until: Mapping[str, int] | None) -> None:
        self._store = store
        columns = ["run_id", "attempt", "job", "start_step"]
        self._tail = ChangeFeed(columns, until=(until or {}).get("job_events"))
        self._starts = pl.DataFrame(
            schema={"run_id": pl.String, "attempt": pl.Int64, "start_step": pl.Int64}
        )
        self._from = pl.DataFrame(
            schema={"run_id": pl.String, "attempt": pl.Int64, "from_step": pl.Int64}
        )

    @property
    def versions(self) -> dict[str, int]:
        return {"job_events": self._tail.version}

    def refresh(self) -> bool:
        """Read new job events; return whether the superseded steps changed."""
        dataset = self._store.dataset("job_events")
        if not self._tail.moved(dataset):
            return False
        rows = pl.DataFrame(pl.from_arrow(self._tail.read(dataset))).filter(job="train")
        rows = rows.select(self._starts.columns)
        known = rows if self._tail.restarted else self._starts.vstack(rows)
        self._starts = known.unique().sort(known.columns)
        later = superseded_steps(self._starts.lazy()).sort("run_id", "attempt").collect()
        moved = not later.equals(self._from)
        self._from = later
        return moved

    def without(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Leave out rows that superseded work made."""
        return without_superseded(rows.lazy(), self._from.lazy()).collect()
