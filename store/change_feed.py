"""What came to a table since one looked last: only new files are read."""

from collections.abc import Sequence

import lance
import pyarrow as pa
import pyarrow.compute as pc

from .schema_versions import scanned

_CREATED = "_row_created_at_version"


class ChangeFeed:
    """Reads each row of a table once, some columns of it, in the order of commits."""

    def __init__(
        self, columns: Sequence[str], *, run_id: str | None = None, until: int | None = None
    ) -> None:
        """Read `columns` (and `_rowid`) of all rows, or of those of one run.

        With `until` only rows that were stored by that version, in whatever version they are read.
        """
        self._columns, self._run_id, self._until = list(columns), run_id, until
        self._forget()
        self.restarted = False
        """Whether the last `read` found known rows gone, and so returned all rows again."""

    def _forget(self) -> None:
        self._version, self._newest, self._rows = 0, -1, 0
        self._fragments: set[int] = set()

    @property
    def version(self) -> int:
        """The version that was read up to: 0 at first, and no more than `until`."""
        return self._version if self._until is None else min(self._version, self._until)

    def moved(self, dataset: lance.LanceDataset) -> bool:
        """Tell whether there is a version that was not read yet."""
        return dataset.version != self._version

    def read(self, dataset: lance.LanceDataset) -> pa.Table:
        """Return the rows that came since the last call.

        When known rows are gone, or gone ones are back (the table was restored, or rows were
        deleted), all that there are.
        """
        rows = self._new(dataset)
        self.restarted = rows is None or self._rows + rows.num_rows != dataset.count_rows()
        if rows is None or self.restarted:
            self._forget()
            rows = self._new(dataset)
            assert rows is not None, "of nothing known, nothing is back"
        self.skip(dataset)
        if self._run_id:
            rows = rows.filter(pc.equal(rows.column("run_id"), self._run_id))
        if self._until is not None:
            rows = rows.filter(pc.less_equal(rows.column(_CREATED), self._until))
        return rows.select([*self._columns, "_rowid"])

    def skip(self, dataset: lance.LanceDataset) -> None:
        """Take everything up to this version as read."""
        self._version, self._rows = dataset.version, dataset.count_rows()
        self._fragments = {f.fragment_id for f in dataset.get_fragments()}
        self._newest = max(self._fragments, default=-1)

    def _new(self, dataset: lance.LanceDataset) -> pa.Table | None:
        """Read the fragments that came, without the rows of them that a compaction put there.

        None when one that was gone is back: ids of fragments only rise, and are not used again.
        """
        # the run is chosen later: for the few rows of a commit, Lance's own filter takes longer
        columns = {*self._columns, _CREATED, *(["run_id"] if self._run_id else [])}
        fragments = dataset.get_fragments() if self.moved(dataset) else []
        new = [f for f in fragments if f.fragment_id not in self._fragments]
        if any(f.fragment_id < self._newest for f in new):
            return None
        if not new:  # for no fragments the scanner would read all
            return scanned(dataset, sorted(columns), limit=0, with_row_id=True)
        rows = scanned(dataset, sorted(columns), fragments=new, with_row_id=True)
        return rows.filter(pc.greater(rows.column(_CREATED), self._version))
