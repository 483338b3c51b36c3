"""What came to a table since one looked last: only new files are read."""

from collections.abc import Sequence

import lance
import pyarrow as pa
import pyarrow.compute as pc


class Tail:
    """Reads each row of a table once, some columns of it, in the order of commits."""

    def __init__(self, columns: Sequence[str], *, where: str | None = None) -> None:
        """Read `columns` (and `_rowid`) of rows for which the Lance filter `where` holds."""
        self._columns, self._where = list(columns), where
        self._version, self._fragment, self._row = 0, -1, -1

    def moved(self, dataset: lance.LanceDataset) -> bool:
        """Tell whether there is a version that was not read yet."""
        return dataset.version != self._version

    def read(self, dataset: lance.LanceDataset) -> pa.Table:
        """Return the rows that came since the last call."""
        fragments = dataset.get_fragments()
        new = (
            [f for f in fragments if f.fragment_id > self._fragment] if self.moved(dataset) else []
        )
        self.skip(dataset)
        if not new:
            return dataset.scanner(columns=self._columns, limit=0, with_row_id=True).to_table()
        rows = dataset.scanner(
            columns=self._columns, filter=self._where, fragments=new, with_row_id=True
        ).to_table()
        # a compacted fragment is new, its rows are not
        rows = rows.filter(pc.greater(rows.column("_rowid").cast(pa.int64()), self._row))
        if rows.num_rows:
            self._row = pc.max(rows.column("_rowid")).as_py()
        return rows

    def skip(self, dataset: lance.LanceDataset) -> None:
        """Take everything up to this version as read."""
        self._version = dataset.version
        self._fragment = max((f.fragment_id for f in dataset.get_fragments()), default=-1)
