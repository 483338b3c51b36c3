"""Read the two experiences of each drawn preference."""

from collections.abc import Sequence

import numpy as np
import polars as pl

from ..changes import ChangeFeed
from ..errors import StoreError
from ..schema_versions import take
from ..store import Store
from .filters import hashed
from .growable_arrays import GrowableArray, Places

_READ = ("preference_id", "chosen_id", "rejected_id", "margin")


class Pairs:
    """Reads drawn preferences as rows: chosen, rejected, chosen, rejected ...

    The address of every experience is kept in memory, updated from new versions only.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._clear(ChangeFeed(["experience_id"]))

    def _clear(self, tail: ChangeFeed) -> None:
        self._tail = tail
        self._hashes, self._row_ids = GrowableArray(np.uint64), GrowableArray(np.uint64)
        self._places = Places()

    @property
    def nbytes(self) -> int:
        """Bytes of all addresses."""
        return sum(array.nbytes for array in (self._hashes, self._row_ids, self._places))

    def read(self, row_ids: Sequence[int], columns: Sequence[str]) -> pl.DataFrame:
        """Return columns of the two experiences of each preference, with its id and its margin.

        Of an experience that is not in the store all but its id is NULL. Raises StoreError
        when a preference was deleted since it was drawn.
        """
        preferences = take(self._store.dataset("preferences"), row_ids, _READ)
        if preferences.num_rows != len(row_ids):
            raise StoreError(
                f"{len(row_ids) - preferences.num_rows} of {len(row_ids)} drawn preferences are "
                "gone: a retention rule or a restore took them since; draw again"
            )
        wanted = pl.DataFrame(pl.from_arrow(preferences)).select(
            "preference_id", "margin", experience_id=pl.concat_list("chosen_id", "rejected_id")
        )
        # chosen, then rejected: the sampler treats every two consecutive rows as one pair
        wanted = wanted.explode("experience_id")
        found = self._read(wanted["experience_id"].unique(maintain_order=True), columns)
        # A left join: without the row of a missing experience, all pairs after it
        # would shift by one.
        return wanted.join(found, on="experience_id", how="left", maintain_order="left")

    def _read(self, ids: pl.Series, columns: Sequence[str]) -> pl.DataFrame:
        """Return the stored ones of these experiences, in any order."""
        self._follow()
        places = self._places.find(self._hashes.values, hashed(ids))
        addresses = self._row_ids.values[places[places >= 0]].tolist()
        names = list(dict.fromkeys(["experience_id", *columns]))
        return pl.DataFrame(
            pl.from_arrow(take(self._store.dataset("experiences"), addresses, names))
        )

    def _follow(self) -> None:
        dataset = self._store.dataset("experiences")
        if not self._tail.moved(dataset):
            return
        rows = self._tail.read(dataset)
        if self._tail.restarted:
            self._clear(self._tail)
        self._hashes.extend(hashed(pl.Series(values=rows.column("experience_id"))))
        self._row_ids.extend(rows.column("_rowid").to_numpy())
