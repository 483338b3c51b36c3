"""Decompress files before they are read, within the free disk space."""

import shutil
from pathlib import Path

import pyarrow as pa

from ..errors import InputError, reason

CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""Codecs by the last suffix of a file name."""
_CHUNK = 4 << 20
_ROOM = 256 << 20
"""Bytes to leave free in the folder of temporary files."""


def inner_name(name: str) -> str:
    """Return the name of a file without the suffix of its codec.

    >>> inner_name("chats.jsonl.gz"), inner_name("chats.jsonl")
    ('chats.jsonl', 'chats.jsonl')
    """
    path = Path(name)
    return path.stem if path.suffix.lower() in CODECS else name


def decompressed(path: Path, folder: Path) -> Path:
    """Decompress a file into a folder and return its path; return other paths unchanged.

    Raises InputError for a damaged or truncated file, or one that exceeds the free space.
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
                # counted while writing: a small file may expand enormously
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
