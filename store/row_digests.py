"""Digests of whole rows, computed when they are appended, to detect flipped bits.

A digest is a function of the row alone: not of other rows, of chunks, or of columns that are NULL
in it, so adding a column changes no digest. Values of fixed width are multiplied by an odd number
of their column and summed, so that any flipped bit changes the sum; the sum and the bytes of texts
and lists are hashed with XXH3, whose definition is fixed.
"""

from functools import cache
from operator import itemgetter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from .ids import binaries

_DIGEST = "digest"
_ROWS_AT_ONCE = 4096
_NOTHING = pa.scalar(b"", pa.large_binary())


def with_digests(rows: pa.Table) -> pa.Table:
    """Set `digest` to the digest over all other columns."""
    place = rows.schema.get_field_index(_DIGEST)
    digests = whole_rows(rows.remove_column(place))
    return rows.set_column(place, rows.schema.field(place), pa.array(digests, pa.string()))


def whole_rows(rows: pa.Table) -> list[str]:
    """Digest each row over all columns given.

    >>> one = pa.table({"a": [1, 2], "b": ["x", None]})
    >>> whole_rows(one)[1] == whole_rows(pa.table({"a": [2]}))[0]
    True
    """
    return [digest for batch in rows.to_batches(_ROWS_AT_ONCE) for digest in _Rows(batch).digests()]


class _Rows:
    """The input of each row's hash: a sum, followed by pieces of bytes."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._sums = np.zeros(batch.num_rows, np.uint64)
        self._pieces: list[pa.Array] = []
        # by name: the order of columns must not change a digest
        columns = sorted(zip(batch.schema.names, batch.columns, strict=True), key=itemgetter(0))
        # A column of NULLs counts as one that is not there: adding a column must
        # not change a digest.
        given = [(name, array) for name, array in columns if array.null_count < len(array)]
        # the texts of all columns stand before the lists of any
        for name, array in given:
            if pa.types.is_string(array.type):
                self._text(name, array)
        for name, array in given:
            self._sums += _there(array) * _number(name, "there")
            if pa.types.is_list(array.type):
                self._nested(name, array, None)
            elif not pa.types.is_string(array.type):
                self._sums += _fixed(array).astype(np.uint64) * _number(name, "value")

    def digests(self) -> list[str]:
        """Hash each row's sum and pieces."""
        sums = binaries(self._sums, np.arange(len(self._sums) + 1) * 8)
        joined = pc.binary_join_element_wise(
            sums, *self._pieces, _NOTHING, null_handling="replace", null_replacement=""
        )
        return [xxh3_128_hexdigest(row) for row in joined.to_pylist()]

    def _text(self, name: str, array: pa.Array) -> None:
        # Arrow allows bytes behind a NULL, which are no part of the row.
        lengths = _lengths(_starts(array)) * _there(array)
        self._sums += lengths.astype(np.uint64) * _number(name, "length")
        self._pieces.append(array.cast(pa.large_binary()))

    def _nested(self, name: str, array: pa.Array, bounds: np.ndarray | None) -> None:
        """Add texts or lists; with `bounds`, those from one to the next are of one row."""
        if array.null_count:
            array = array.take(pa.array(np.arange(len(array))))  # a copy in which NULL has no bytes
        starts = _starts(array)
        if bounds is None:
            self._sums += _lengths(starts).astype(np.uint64) * _number(name, "length")
        else:
            self._piece(_lengths(starts), bounds)
        inner = starts if bounds is None else starts[bounds]
        if isinstance(array, pa.ListArray):
            self._values(f"{name}[]", array.values, inner)
        else:
            self._piece(_bytes(array), inner)

    def _values(self, name: str, array: pa.Array, bounds: np.ndarray) -> None:
        """Add what lists hold: those from one bound to the next are of one row."""
        if isinstance(array, pa.StructArray):
            for field, values in zip(array.type, array.flatten(), strict=True):
                self._values(f"{name}.{field.name}", values, bounds)
            return
        if array.null_count:
            at = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
            row = np.searchsorted(bounds, at, side="right") - 1
            inside = (row >= 0) & (row < len(self._sums))
            place = (at - bounds[row] + 1)[inside].astype(np.uint64)
            np.add.at(self._sums, row[inside], place * _number(name, "null"))
        if pa.types.is_list(array.type) or pa.types.is_string(array.type):
            self._nested(name, array, bounds)
        else:
            self._piece(_fixed(array), bounds)

    def _piece(self, values: np.ndarray, bounds: np.ndarray) -> None:
        self._pieces.append(binaries(values, bounds * values.itemsize))


def _starts(array: pa.Array) -> np.ndarray:
    """Return the offset of each text or list, and the end of the last one."""
    if not len(array):
        return np.zeros(1, np.int64)
    kind = np.dtype(np.int64 if pa.types.is_large_string(array.type) else np.int32)
    buffer, skipped = array.buffers()[1], array.offset * kind.itemsize
    return np.frombuffer(buffer, kind, len(array) + 1, skipped).astype(np.int64)


def _lengths(starts: np.ndarray) -> np.ndarray:
    return starts[1:] - starts[:-1]


def _bytes(texts: pa.Array) -> np.ndarray:
    return np.frombuffer(texts.buffers()[2] or b"", np.uint8)


def _there(array: pa.Array) -> "np.ndarray | np.uint64":
    """Return 1 for each value that is not NULL, and else 0; 1 for all when none is."""
    if not array.null_count:
        return np.uint64(1)
    return array.is_valid().to_numpy(zero_copy_only=False).astype(np.uint64)


def _fixed(array: pa.Array) -> np.ndarray:
    """Return values of fixed width as integers of the same bits, and 0 for NULL."""
    width = max(8, array.type.bit_width) // 8
    if not len(array):
        return np.zeros(0, f"<u{width}")
    if array.null_count:
        array = array.fill_null(pa.scalar(0).cast(array.type))
    if pa.types.is_boolean(array.type):
        bits = np.frombuffer(array.buffers()[1], np.uint8)
        end = array.offset + len(array)
        return np.unpackbits(bits, count=end, bitorder="little")[array.offset :]
    return np.frombuffer(array.buffers()[1], f"<u{width}", len(array), width * array.offset)


@cache
def _number(column: str, what: str) -> np.uint64:
    """Return the odd factor of a column: multiplying by an odd number loses no bit."""
    return np.uint64(xxh3_64_intdigest(f"{column}\x1f{what}".encode()) | 1)
