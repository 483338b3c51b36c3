"""Rows of a named format become batches of ours, bounded in bytes."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa

from ..errors import SchemaError
from ..schema import TABLES
from .duckdb_input import BATCH_BYTES, BATCH_ROWS
from .formats import Row
from .formats.format import LEFT_OUT, NOT_READ, Ours
from .rejected_rows import Rejected
from .select_columns import RowError

_OURS = {c.name: c.type for c in (*TABLES["tasks"].columns, *TABLES["experiences"].columns)}
_ALSO = {"num_asked": pa.int64(), "margin": pa.float64(), "task_metadata": pa.string()}
"""What a format tells beside our columns: see `filling`."""

_UNFIT = (pa.ArrowException, ValueError, TypeError, OverflowError)


def batches_of(
    name: str,
    rows: Iterable[Row],
    make: Callable[[Row], list[Ours]],
    columns: Sequence[str],
    *,
    left_out: Counter[str],
    not_read: Counter[str],
    rejected: Rejected | None = None,
) -> Iterator[tuple[list[int], pa.Table]]:
    """Yield what a format makes of each row, and which row that was, from 0.

    What is made of one row is never in two batches. Reasons why rows, or parts of them, were not
    read are counted. Raises SchemaError for a row of the file `name` that does not fit, unless
    such rows are `rejected`.
    """

    def refuse(place: int, why: str, content: object) -> None:
        if rejected is None:
            raise SchemaError(f"row {place + 1} of `{name}`: {why}")
        rejected.add(name, "row", place + 1, why, content)

    schema = pa.schema([(name, (_OURS | _ALSO)[name]) for name in columns])
    kept: list[Ours] = []
    places: list[int] = []
    size = 0
    for place, row in enumerate(rows):
        try:
            made = make(row)
        except RowError as error:
            refuse(place, error.message, row.told())
            continue
        for one in made:
            if one.get(LEFT_OUT):
                left_out[one[LEFT_OUT]] += 1
                continue
            if one.get(NOT_READ):
                not_read[one[NOT_READ]] += 1
            kept.append(one)
            places.append(place)
            size += sum(map(_size, one.values()))
        if size >= BATCH_BYTES or len(kept) >= BATCH_ROWS:
            yield _tabled(kept, places, schema, refuse)
            kept, places, size = [], [], 0
    if kept:
        yield _tabled(kept, places, schema, refuse)


def _tabled(
    rows: list[Ours],
    places: list[int],
    schema: pa.Schema,
    refuse: Callable[[int, str, object], None],
) -> tuple[list[int], pa.Table]:
    """Return rows as a table; what no column can hold is refused, with all rows of its place."""
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
            refuse(place, why, None)
        kept = [(p, row) for p, row in zip(places, rows, strict=True) if p not in bad]
        return [p for p, _ in kept], pa.Table.from_pylist([row for _, row in kept], schema)


def _size(value: object) -> int:
    """Return about how many bytes a value takes: a text's, or those of a list of numbers."""
    if isinstance(value, str):
        return len(value)
    return 8 * len(value) if isinstance(value, list) else 8
