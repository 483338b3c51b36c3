"""Read the rows that were added to a table since the last read, from new files only."""

from collections.abc import Sequence

import lance
import pyarrow as pa
import pyarrow.compute as pc

from .schema_versions import scanned

CREATED = "_row_created_at_version"
"""Lance's column of the version that first had a row, whatever file it is in now."""


class ChangeFeed:
    """Reads some columns of each row of a table once, in the order of commits."""

    def __init__(
        self, columns: Sequence[str], *, run_id: str | None = None, until: int | None = None
    ) -> None:
        """Read `columns` (and `_rowid`) of all rows, or of those of one run.

        With `until`, only rows that were stored by that version are read.
        """
        self._columns, self._run_id, self._until = list(columns), run_id, until
        self._forget()
        self.restarted = False
        """Whether the last `read` found known rows deleted, and so returned all rows again."""

    def _forget(self) -> None:
        self._version, self._newest, self._rows = 0, -1, 0
        self._fragments: set[int] = set()

    @property
    def version(self) -> int:
        """The last version that was read, at most `until`; 0 before the first read."""
        return self._version if self._until is None else min(self._version, self._until)

    def moved(self, dataset: lance.LanceDataset) -> bool:
        """Return whether the table has a version that was not read yet."""
        return dataset.version != self._version

    def read(self, dataset: lance.LanceDataset) -> pa.Table:
        """Return the rows that were added since the last call.

        When known rows were deleted, or deleted ones came back with a restore, return all rows.
        """
        rows = self._new(dataset)
        # compare counts too: a delete leaves the fragments in place, with fewer rows
        self.restarted = rows is None or self._rows + rows.num_rows != dataset.count_rows()
        if rows is None or self.restarted:
            self._forget()
            rows = self._new(dataset)
            assert rows is not None, "of nothing known, nothing is back"
        self.skip(dataset)
        if self._run_id:
            rows = rows.filter(pc.equal(rows.column("run_id"), self._run_id))
        if self._until is not None:
            rows = rows.filter(pc.less_equal(rows.column(CREATED), self._until))
        return rows.select([*self._columns, "_rowid"])

    def skip(self, dataset: lance.LanceDataset) -> None:
        """Mark everything up to this version as read."""
        self._version, self._rows = dataset.version, dataset.count_rows()
        self._fragments = {f.fragment_id for f in dataset.get_fragments()}
        self._newest = max(self._fragments, default=-1)

    def _new(self, dataset: lance.LanceDataset) -> pa.Table | None:
        """Read new fragments, without rows that a compaction moved there.

        Return None when an old fragment is back: ids of fragments only rise and are never reused.
        """
        # the run is filtered later: for the few rows of a commit, Lance's own filter is slower
        columns = {*self._columns, CREATED, *(["run_id"] if self._run_id else [])}
        fragments = dataset.get_fragments() if self.moved(dataset) else []
        new = [f for f in fragments if f.fragment_id not in self._fragments]
        if any(f.fragment_id < self._newest for f in new):
            return None
        if not new:  # given no fragments, the scanner would read all of them
            return scanned(dataset, sorted(columns), limit=0, with_row_id=True)
        rows = scanned(dataset, sorted(columns), fragments=new, with_row_id=True)
        return rows.filter(pc.greater(rows.column(CREATED), self._version))
