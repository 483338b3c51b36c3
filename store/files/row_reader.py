"""A file's rows as rows of ours, by a SELECT or a named format, and the place of each."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import duckdb
import pyarrow as pa

from ..errors import SchemaError
from ..schema import Column, Table, table
from ..validate import check
from .defaults import experience_columns
from .duckdb_input import InputFile, InputSession, in_batches
from .format_batches import batches_of
from .formats import Format
from .rejected_rows import sieved
from .select_columns import RowError, check_columns, typed

Progress = Callable[[str, int, int], None]
"""Is told, now and then, what is done and how many rows and bytes that was for so far."""


class FileRows:
    """A file's rows as rows of ours, batch by batch, with the place of each for errors."""

    def __init__(
        self,
        declared: Table,
        file: InputFile,
        session: InputSession,
        progress: Progress | None,
        format: Format | None = None,
    ) -> None:
        self.declared, self.format = declared, format
        self._file, self._session, self._progress = file, session, progress
        self.is_pairs = format is not None and format.is_pairs
        self.read = 0
        """Rows of ours read so far."""
        self.left_out: Counter[str] = Counter()
        """Rows of the file that were left out, by reason."""
        self.not_read: Counter[str] = Counter()
        """Parts of rows that were not read, by reason."""
        self._places: Sequence[int] = ()

    def spool(self, fill: Callable[[pa.Table], None], probe: Callable[[pa.Table], object]) -> None:
        """Hand all rows to `fill`, batch by batch; those that `probe` refuses may be left out."""
        nbytes = 0
        try:
            for places, rows in self._given():
                if self._file.rejected is not None:
                    places, rows = sieved(rows, places, probe, self._reject)
                self._places = places
                self.read += rows.num_rows
                nbytes += rows.nbytes
                fill(rows)
                if self._progress is not None:
                    self._progress("reading", self.read, nbytes)
        except RowError as error:
            raise SchemaError(self._place(error.row) + error.message) from error
        except duckdb.Error as error:
            raise self._session.failed(error) from error

    def check(self, name: str, filled: pa.Table) -> None:
        """Raise SchemaError with the place of the row that does not fit a table."""
        try:
            check(table(name), filled)
        except SchemaError as error:
            raise self._located(error, name, filled) from error

    def _reject(self, place: int, why: str, rows: pa.Table) -> None:
        assert self._file.rejected is not None, "rows are left out where that was asked for"
        why = why.replace(" in row 0", "").replace(" in 1 of 1 rows", "")
        given = [{k: v for k, v in row.items() if v is not None} for row in rows.to_pylist()]
        content = given[0] if len(given) == 1 else given
        self._file.rejected.add(self._file.name, "row", place + 1, why, content)

    def _located(self, error: SchemaError, name: str, filled: pa.Table) -> SchemaError:
        for row in range(filled.num_rows):
            try:
                check(table(name), filled.slice(row, 1))
            except SchemaError as first:
                message = str(first).replace(" in row 0", "").replace(" in 1 of 1 rows", "")
                return SchemaError(self._place(row) + message)
        return error

    def _given(self) -> Iterator[tuple[Sequence[int], pa.Table]]:
        """Yield rows with the columns that the file gives, typed as declared, and their places."""
        raise NotImplementedError

    def _place(self, row: int) -> str:
        return f"row {self._places[row] + 1} of `{self._file.name}`, as selected: "


class Selected(FileRows):
    """The rows that a SELECT gives."""

    def __init__(
        self,
        declared: Table,
        file: InputFile,
        session: InputSession,
        progress: Progress | None,
        query: str,
        format: Format | None = None,
    ) -> None:
        super().__init__(declared, file, session, progress, format)
        relation = session.select(query)
        self._query = query
        self._allowed: tuple[Column, ...] = declared.columns
        if declared.name == "experiences":
            self._allowed = experience_columns(relation.columns)
        self._kinds = dict(zip(relation.columns, relation.types, strict=True))
        given = relation.limit(0).to_arrow_table().schema
        check_columns(declared, self._allowed, given, self._kinds)

    def _given(self) -> Iterator[tuple[Sequence[int], pa.Table]]:
        selected = 0
        for batch in in_batches(self._session.reader(self._query)):
            places: Sequence[int] = range(selected, selected + batch.num_rows)
            selected += batch.num_rows
            self._places = places
            if self._file.rejected is not None:
                given = pa.Table.from_batches([batch])
                places, given = sieved(given, places, self._typed, self._reject)
                batch = given.combine_chunks().to_batches()[0] if places else batch.slice(0, 0)
            yield places, self._typed(batch)

    def _typed(self, rows: pa.Table | pa.RecordBatch) -> pa.Table:
        batch = rows if isinstance(rows, pa.RecordBatch) else rows.combine_chunks().to_batches()[0]
        return typed(batch, self._allowed, self._kinds)


class Mapped(FileRows):
    """The rows that a named format makes."""

    def _given(self) -> Iterator[tuple[Sequence[int], pa.Table]]:
        assert self.format is not None, "rows are mapped by a format"
        make = self.format.tasks if self.declared.name == "tasks" else self.format.rows
        assert make is not None, "the format gives this table"
        columns = ("messages", "answer") if self.declared.name == "tasks" else self.format.columns
        yield from batches_of(
            self._file.name,
            self._session.rows(),
            make,
            columns,
            left_out=self.left_out,
            not_read=self.not_read,
            rejected=self._file.rejected,
        )

    def _place(self, row: int) -> str:
        return f"row {self._places[row] + 1} of `{self._file.name}`: "
