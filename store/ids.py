"""Deterministic ids from content or position, and digests of rows."""

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# Stored ids depend on these options: with others, every task would be stored a second time.
_canonical = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode
_spelled = json.JSONEncoder(ensure_ascii=False, default=str).encode


def content_id(*parts: object, length: int = 20) -> str:
    """Hash JSON-able parts to hexadecimal text.

    >>> content_id("2+2", "4") == content_id("2+2", "4")
    True
    >>> content_id("ab", "c") == content_id("a", "bc")
    False
    """
    return hashlib.sha256(_canonical(parts).encode()).hexdigest()[:length]


def group_id(run_id: str, batch: int, index: int) -> str:
    """Name the group at position `index` of the explorer's `batch` (from 1); sorts by creation.

    >>> group_id("demo", 3, 7)
    'demo/000003/0007'
    """
    return f"{run_id}/{batch:06d}/{index:04d}"


def rollout_id(group: str, rollout: int, row: int = 0) -> str:
    """Name row `row` of a rollout within its group.

    >>> rollout_id("demo/000003/0007", 2)
    'demo/000003/0007/02'
    >>> rollout_id("demo/000003/0007", 2, 1)
    'demo/000003/0007/02.1'
    """
    return f"{group}/{rollout:02d}" + (f".{row}" if row else "")


def preference_id(chosen: str, rejected: str) -> str:
    """Name a pair of experiences: the same two rows are one pair, whoever compared them."""
    return content_id(chosen, rejected)


def lineage_id() -> str:
    """Name an import or a pipeline run that starts now; names sort by time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{secrets.token_hex(4)}"


def row_digests(rows: pa.Table) -> list[str]:
    """Digest each row over all given columns and their names.

    Only the bytes of the values are hashed, so that equal values in different chunks or buffers
    have equal digests.
    """
    columns = sorted(rows.column_names)
    if not columns:
        return []
    parts: list[pa.Array | pa.Scalar] = [_bytes("\x1f".join(columns).encode())]
    for name in columns:
        cells = _cells(rows.column(name))
        # with their lengths, or `ab`, `c` would have the digest of `a`, `bc`
        parts += [_lengths(cells), cells]
    framed = pc.binary_join_element_wise(
        *parts, _bytes(b""), null_handling="replace", null_replacement=""
    )
    # stored in `draws`: after a change here, `rlake verify` would report every earlier step
    return [blake2b(row, digest_size=16).hexdigest() for row in framed.to_pylist()]


def combine(digests: Iterable[str]) -> str:
    """Digest an ordered list of digests: a batch, from its rows."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:32]


def _bytes(value: bytes) -> pa.Scalar:
    return pa.scalar(value, pa.large_binary())


def _lengths(cells: pa.Array) -> pa.Array:
    """Return a byte 1 and the length of each value as eight bytes, or a byte 0 for NULL."""
    sizes = pc.fill_null(pc.binary_length(cells), 0).to_numpy()
    framed = np.ones((len(cells), 9), np.uint8)
    framed[:, 1:] = sizes.astype("<u8").view(np.uint8).reshape(-1, 8)
    starts = np.arange(len(cells) + 1) * 9
    if cells.null_count:
        there = cells.is_valid().to_numpy(zero_copy_only=False)
        framed[~there, 0] = 0
        starts = np.append(0, np.cumsum(np.where(there, 9, 1)))
        framed = framed[np.column_stack([np.ones(len(cells), bool), *[there] * 8])]
    return binaries(framed, starts)


def binaries(values: np.ndarray, starts: np.ndarray, valid: pa.Buffer | None = None) -> pa.Array:
    """Return bytes of an array as Arrow's, those from one start to the next."""
    buffers = [valid, pa.py_buffer(starts.astype(np.int64)), pa.py_buffer(values.tobytes())]
    return pa.Array.from_buffers(pa.large_binary(), len(starts) - 1, buffers)


def _cells(column: pa.ChunkedArray) -> pa.Array:
    """Return each value as bytes: text, the buffer of a primitive list, or else JSON."""
    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if lists and pa.types.is_primitive(kind.value_type):
        return _list_cells(column)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return _whole(column.cast(pa.large_binary()))
    if not pa.types.is_primitive(kind):
        return _spelled_all(column.to_pylist())
    # each value once, since most numbers of a column repeat; by their bits: -0.0 is not 0.0
    given = _whole(column)
    bits = given.view(f"int{kind.bit_width}") if pa.types.is_floating(kind) else given
    coded = bits.dictionary_encode()
    values = coded.dictionary.view(kind)
    if pa.types.is_floating(kind) and pc.all(pc.is_finite(values), min_count=0).as_py():
        # as the encoder writes them; it writes NaN and infinity in a way of its own
        texts = pa.array([b"%a" % v for v in values.to_pylist()], pa.large_binary())
    else:
        texts = _spelled_all(values.to_pylist())
    return texts.take(coded.indices)


def _spelled_all(values: Sequence[object]) -> pa.Array:
    texts = [None if v is None else _spelled(v).encode() for v in values]
    return pa.array(texts, pa.large_binary())


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _list_cells(column: pa.ChunkedArray) -> pa.Array:
    # as large lists: those of several chunks may have more values than 32 bits count
    is_large = pa.types.is_large_list(column.type)
    array = _whole(column if is_large else column.cast(pa.large_list(column.type.value_type)))
    values = array.values.to_numpy(zero_copy_only=False)
    starts = array.offsets.to_numpy() * values.itemsize
    return binaries(values, starts, array.is_valid().buffers()[1] if array.null_count else None)
