"""Name temporary files after their process, so that stale ones can be removed."""

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
    """Return the part of a name that identifies this process."""
    return f"{_host()}-{os.getpid()}"


def _host() -> str:
    """Return a short name of this machine, since process ids are unique only within it."""
    return f"{crc32(socket.gethostname().encode()):08x}"


def tidy(folder: Path, begins: str) -> None:
    """Remove files with this prefix of ended processes of this machine from a folder."""
    mine = f"{begins}{_host()}-"
    for place in folder.glob(f"{escape(mine)}*"):
        pid = re.split(r"\D", place.name.removeprefix(mine))[0]
        if pid and _is_gone(int(pid)):
            _remove(place)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder in the system's folder for temporary files (TMPDIR)."""
    tidy(Path(gettempdir()), _FOLDER)
    with TemporaryDirectory(prefix=f"{_FOLDER}{mark()}-") as folder:
        yield Path(folder)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # another user's process is alive; a number out of range is not ours to judge
    except (PermissionError, OverflowError):
        return False
    return False


def _remove(place: Path) -> None:
    """Remove a file or folder, unless it is another user's or was removed meanwhile."""
    shutil.rmtree(place, ignore_errors=True)
    if not place.is_dir():
        try:
            place.unlink(missing_ok=True)
        except PermissionError:
            return
