"""Read a file's rows as rows of a table, by a SELECT or a named format, each with its number."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import duckdb
import pyarrow as pa

from ..errors import InputError, SchemaError
from ..schema import TABLES, Column, Table, table
from ..validate import check
from .defaults import experience_columns
from .duckdb_input import BATCH_BYTES, BATCH_ROWS, InputFile, InputSession, in_batches
from .formats import Format
from .formats.format import LEFT_OUT, NOT_READ, Ours
from .rejected_rows import sieved
from .row_images import IMAGES, as_cell, sources_of
from .select_columns import IMAGE_COLUMNS, RowError, check_columns, typed

Progress = Callable[[str, int, int], None]
"""Called now and then with the current activity, and the rows and bytes done so far."""

Numbered = tuple[Sequence[int], pa.Table]
"""Rows, and for each the number of the row in the file that it was made from, counted from 0."""

_OURS = {c.name: c.type for c in (*TABLES["tasks"].columns, *TABLES["experiences"].columns)}
_ALSO = {"num_asked": pa.int64(), "margin": pa.float64(), "task_metadata": pa.string()}
_IMAGES = IMAGE_COLUMNS[0]
_ALSO |= {_IMAGES: IMAGES}
"""Columns that a format may give in addition to ours: `defaults` reads them."""

_UNFIT = (pa.ArrowException, ValueError, TypeError, OverflowError)


@dataclass
class FileRows:
    """A file's rows as rows of a table, in batches."""

    declared: Table
    file: InputFile
    session: InputSession
    progress: Progress | None
    format: Format | None = None
    read: int = 0
    """Rows read so far."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows of the file that were left out, by reason."""
    not_read: Counter[str] = field(default_factory=Counter)
    """Parts of rows that were not read, by reason."""
    _places: Sequence[int] = ()

    @property
    def is_pairs(self) -> bool:
        """Whether each row of the file gives two experiences, the better one first."""
        return self.format is not None and self.format.is_pairs

    def spool(self, fill: Callable[[pa.Table], None], probe: Callable[[pa.Table], object]) -> None:
        """Pass all rows to `fill`, batch by batch; rows that `probe` refuses may be left out."""
        nbytes = 0
        try:
            for places, rows in self._given():
                if self.file.rejected is not None:
                    places, rows = sieved(rows, places, probe, self._reject)
                self._places = places
                self.read += rows.num_rows
                nbytes += rows.nbytes
                fill(rows)
                if self.progress is not None:
                    self.progress("reading", self.read, nbytes)
        except RowError as error:
            raise SchemaError(self._place(error.row) + error.message) from error
        except duckdb.Error as error:
            raise self.session.failed(error) from error

    def check(self, name: str, filled: pa.Table) -> None:
        """Raise SchemaError with the number of the first row that does not fit a table."""
        try:
            check(table(name), filled)
        except SchemaError as error:
            raise self._located(error, name, filled) from error

    def _reject(self, place: int, why: str, rows: pa.Table) -> None:
        rows = rows.select([name for name in rows.column_names if name not in IMAGE_COLUMNS])
        given = [{k: v for k, v in row.items() if v is not None} for row in rows.to_pylist()]
        self._refuse(place, _alone(why), given[0] if len(given) == 1 else given)

    def _refuse(self, place: int, why: str, content: object) -> None:
        if self.file.rejected is None:
            raise SchemaError(f"row {place + 1} of `{self.file.name}`: {why}")
        self.file.rejected.add(self.file.name, "row", place + 1, why, content)

    def _located(self, error: SchemaError, name: str, filled: pa.Table) -> SchemaError:
        # Row by row, which is slow, but happens once: the first error ends the import.
        for row in range(filled.num_rows):
            try:
                check(table(name), filled.slice(row, 1))
            except SchemaError as first:
                return SchemaError(self._place(row) + _alone(str(first)))
        return error

    def _given(self) -> Iterator[Numbered]:
        """Yield rows with the columns that the file gives, typed as declared."""
        raise NotImplementedError

    def _place(self, row: int) -> str:
        return f"row {self._places[row] + 1} of `{self.file.name}`, as selected: "


@dataclass
class Selected(FileRows):
    """The rows of a SELECT."""

    query: str = "SELECT * FROM input"

    def __post_init__(self) -> None:
        relation = self.session.select(self.query)
        self._allowed: tuple[Column, ...] = self.declared.columns
        if self.declared.name == "experiences":
            self._allowed = experience_columns(relation.columns)
        if self.declared.name != "preferences":
            self._allowed += tuple(
                Column(name, IMAGES, "images of a row") for name in IMAGE_COLUMNS
            )
        self._kinds = dict(zip(relation.columns, relation.types, strict=True))
        given = relation.limit(0).to_arrow_table().schema
        check_columns(self.declared, self._allowed, given, self._kinds)

    def _given(self) -> Iterator[Numbered]:
        selected = 0
        for batch in in_batches(self.session.batches(self.query)):
            places: Sequence[int] = range(selected, selected + batch.num_rows)
            selected += batch.num_rows
            # before the cast: its error names a row of this batch
            self._places = places
            if self.file.rejected is not None:
                given = pa.Table.from_batches([batch])
                places, given = sieved(given, places, self._typed, self._reject)
                batch = given.combine_chunks().to_batches()[0] if places else batch.slice(0, 0)
            yield places, self._typed(batch)

    def _typed(self, rows: pa.Table | pa.RecordBatch) -> pa.Table:
        batch = rows if isinstance(rows, pa.RecordBatch) else rows.combine_chunks().to_batches()[0]
        return typed(batch, self._allowed, self._kinds)


class Mapped(FileRows):
    """The rows that a named format makes of the file's rows, in batches bounded in bytes."""

    def _given(self) -> Iterator[Numbered]:
        assert self.format is not None, "rows are mapped by a format"
        is_tasks = self.declared.name == "tasks"
        make = self.format.tasks if is_tasks else self.format.rows
        assert make is not None, "the format gives this table"
        columns = ("messages", "answer") if is_tasks else self.format.columns
        shows = [name for name in IMAGE_COLUMNS if name in self.session.columns]
        columns = (*columns, _IMAGES) if shows else columns
        schema = pa.schema([(name, (_OURS | _ALSO)[name]) for name in columns])
        kept: list[Ours] = []
        places: list[int] = []
        size = 0
        for place, row in enumerate(self.session.rows()):
            try:
                images = (
                    {_IMAGES: as_cell(sources_of([row.pop(n) for n in shows]))} if shows else {}
                )
                made = [one | images for one in make(row) if self._is_read(one)]
            except (RowError, InputError) as error:
                self._refuse(place, str(error), row.as_dict())
                continue
            kept += made
            places += [place] * len(made)
            size += sum(_size(value) for one in made for value in one.values())
            # between rows of the file: a pair must not be split over two batches
            if size >= BATCH_BYTES or len(kept) >= BATCH_ROWS:
                yield self._table(kept, places, schema)
                kept, places, size = [], [], 0
        if kept:
            yield self._table(kept, places, schema)

    def _is_read(self, row: Ours) -> bool:
        """Count what was left out or not read of a row, and return whether it is kept."""
        if row.get(LEFT_OUT):
            self.left_out[row[LEFT_OUT]] += 1
            return False
        if row.get(NOT_READ):
            self.not_read[row[NOT_READ]] += 1
        return True

    def _table(self, rows: list[Ours], places: list[int], schema: pa.Schema) -> Numbered:
        """Return rows as a table; a row that does not fit is refused with all of its place."""
        try:
            return places, pa.Table.from_pylist(rows, schema)
        except _UNFIT:
            bad: dict[int, str] = {}
            for place, row in zip(places, rows, strict=True):
                try:
                    pa.Table.from_pylist([row], schema)
                except _UNFIT as error:
                    bad.setdefault(place, str(error).splitlines()[0])
            for place, why in bad.items():
                self._refuse(place, why, None)
            kept = [(p, row) for p, row in zip(places, rows, strict=True) if p not in bad]
            return [p for p, _ in kept], pa.Table.from_pylist([row for _, row in kept], schema)

    def _place(self, row: int) -> str:
        return f"row {self._places[row] + 1} of `{self.file.name}`: "


def _alone(message: str) -> str:
    """Return the error of a table of one row without that row's number."""
    return message.replace(" in row 0", "").replace(" in 1 of 1 rows", "")


def _size(value: object) -> int:
    """Return about how many bytes a value takes: those of a text or of a list of numbers."""
    if isinstance(value, str):
        return len(value)
    return 8 * len(value) if isinstance(value, list) else 8
