"""What came to a table since one looked last: only new files are read."""

from collections.abc import Sequence

import lance
import pyarrow as pa
import pyarrow.compute as pc


class Tail:
    """Reads each row of a table once, some columns of it, in the order of commits."""

    def __init__(self, columns: Sequence[str], *, run_id: str | None = None) -> None:
        """Read `columns` (and `_rowid`) of all rows, or of those of one run."""
        self._columns, self._run_id = list(columns), run_id
        self._version, self._fragment, self._row = 0, -1, -1

    def moved(self, dataset: lance.LanceDataset) -> bool:
        """Tell whether there is a version that was not read yet."""
        return dataset.version != self._version

    def read(self, dataset: lance.LanceDataset) -> pa.Table:
        """Return the rows that came since the last call."""
        known, fragments = self._fragment, dataset.get_fragments()
        new = [f for f in fragments if f.fragment_id > known] if self.moved(dataset) else []
        self._note(dataset, fragments)
        if not new:
            return dataset.scanner(columns=self._columns, limit=0, with_row_id=True).to_table()
        # the run is chosen here: for the few rows of a commit, Lance's own filter takes longer
        columns = {*self._columns, "run_id"} if self._run_id else self._columns
        rows = dataset.scanner(columns=sorted(columns), fragments=new, with_row_id=True).to_table()
        if self._run_id:
            rows = rows.filter(pc.equal(rows.column("run_id"), self._run_id))
        # a compacted fragment is new, its rows are not
        rows = rows.filter(pc.greater(rows.column("_rowid").cast(pa.int64()), self._row))
        if rows.num_rows:
            self._row = pc.max(rows.column("_rowid")).as_py()
        return rows.select([*self._columns, "_rowid"])

    def skip(self, dataset: lance.LanceDataset) -> None:
        """Take everything up to this version as read."""
        self._note(dataset, dataset.get_fragments())

    def _note(self, dataset: lance.LanceDataset, fragments: list[lance.LanceFragment]) -> None:
        self._version = dataset.version
        self._fragment = max((f.fragment_id for f in fragments), default=-1)
