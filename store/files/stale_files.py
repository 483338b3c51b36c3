"""What a process writes beside its work says whose it is, so that what a killed one left can go."""

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from zlib import crc32

_FOLDER = "rlake-import-"


def mark() -> str:
    """Return the part of a name that says which process made a file."""
    return f"{_host()}-{os.getpid()}"


def _host() -> str:
    """Return a short name of this machine: process ids are its own."""
    return f"{crc32(socket.gethostname().encode()):08x}"


def tidy(folder: Path, begins: str) -> None:
    """Remove what processes of this machine that are gone left in a folder under such names."""
    mine = f"{begins}{_host()}-"
    for place in folder.glob(f"{escape(mine)}*"):
        pid = re.split(r"\D", place.name.removeprefix(mine))[0]
        if pid and _is_gone(int(pid)):
            _remove(place)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Give a folder in the system's place for temporary files, which TMPDIR names."""
    tidy(Path(gettempdir()), _FOLDER)
    with TemporaryDirectory(prefix=f"{_FOLDER}{mark()}-") as folder:
        yield Path(folder)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _remove(place: Path) -> None:
    """Remove a file or folder; one that is another user's, or went meanwhile, stays as it is."""
    shutil.rmtree(place, ignore_errors=True)
    if not place.is_dir():
        try:
            place.unlink(missing_ok=True)
        except PermissionError:
            return
