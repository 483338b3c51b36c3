"""Compressed files, written out as they are inside before they are read, and bounded in bytes."""

import shutil
from pathlib import Path

import pyarrow as pa

from ..errors import InputError, reason

CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""How a file is compressed, by the suffix after that of its kind."""
_CHUNK = 4 << 20
_ROOM = 256 << 20
"""Bytes that stay free where temporary files lie."""


def inner_name(name: str) -> str:
    """Return the name of what a file holds.

    >>> inner_name("talks.jsonl.gz"), inner_name("talks.jsonl")
    ('talks.jsonl', 'talks.jsonl')
    """
    path = Path(name)
    return path.stem if path.suffix.lower() in CODECS else name


def decompressed(path: Path, folder: Path) -> Path:
    """Write what a compressed file holds to a folder, and return where; others are where they are.

    Raises InputError for one that is broken or was cut off, or has more bytes than there is room.
    """
    codec = CODECS.get(path.suffix.lower())
    if codec is None or not path.is_file():
        return path
    whole = folder / inner_name(path.name)
    room = shutil.disk_usage(folder).free - _ROOM
    try:
        with (
            pa.CompressedInputStream(pa.OSFile(str(path)), codec) as source,
            whole.open("wb") as out,
        ):
            while chunk := source.read(_CHUNK):
                room -= len(chunk)
                if room < 0:
                    raise InputError(
                        f"`{path}` holds more than there is room for in `{folder.parent}`; name a "
                        "folder with more in TMPDIR; nothing was imported"
                    )
                out.write(chunk)
    except OSError as error:
        raise InputError(
            f"cannot read `{path}` as {codec}: {reason(error)}; nothing was imported"
        ) from error
    return whole
