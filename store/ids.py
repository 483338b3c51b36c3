"""Deterministic ids from content or position, and digests of rows."""

import hashlib
import json
import secrets
import struct
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

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
    header = "\x1f".join(columns).encode()
    values = [_cells(rows.column(name)) for name in columns]
    return [_digest(header, cells) for cells in zip(*values, strict=True)] if values else []


def combine(digests: Iterable[str]) -> str:
    """Digest an ordered list of digests: a batch, from its rows."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:32]


def _digest(header: bytes, cells: Sequence[bytes | None]) -> str:
    # with their lengths, or `ab`, `c` would have the digest of `a`, `bc`
    framed = [b"\x00" if c is None else b"%b%b" % (_size(1, len(c)), c) for c in cells]
    # stored in `draws`: after a change here, `rlake verify` would report every earlier step
    return hashlib.blake2b(header + b"".join(framed), digest_size=16).hexdigest()


_size = struct.Struct("<BQ").pack


def _cells(column: pa.ChunkedArray) -> list[bytes | None]:
    """Return each value as bytes: text, the buffer of a primitive list, or else JSON."""
    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if lists and pa.types.is_primitive(kind.value_type):
        return _list_cells(column)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.large_binary()).to_pylist()
    if pa.types.is_floating(kind) and pc.all(pc.is_finite(column), min_count=0).as_py():
        # as the encoder writes them; it writes NaN and infinity in a way of its own
        return [None if v is None else b"%a" % v for v in column.to_pylist()]
    return [None if v is None else _spelled(v).encode() for v in column.to_pylist()]


def _list_cells(column: pa.ChunkedArray) -> list[bytes | None]:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    values = array.values.to_numpy(zero_copy_only=False)
    offsets = array.offsets.to_numpy()
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return [
        values[offsets[i] : offsets[i + 1]].tobytes() if valid[i] else None
        for i in range(len(array))
    ]
