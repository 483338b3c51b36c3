"""What was answered and is not stored yet, in files that outlive the process.

Entries are lines of JSON. `write` returns when its line is on the disk; lines that come together
share one sync. A file goes when the sessions of all its lines are stored. A server that is
killed leaves its files, and the next one stores what stands in them.
"""

import asyncio
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ...store.files.atomic_writer import sync
from ..chat_api.sessions import new_key

FILE_BYTES = 32 << 20
"""A file that is larger is followed by another."""
QUEUE_LINES = 10_000
_LOCK = ".lock"
_NAME = "journal-"
"""How the folders begin; nothing else is looked at, or removed."""

_log = logging.getLogger(__name__)

Entry = Callable[[], dict[str, Any]]
"""Makes an entry; called in the journal's own thread."""


@dataclass
class _File:
    path: Path
    number: int
    nbytes: int = 0
    keys: set[str] = field(default_factory=set)
    """Sessions in it that are not stored."""


@dataclass
class _Line:
    key: str
    entry: Entry
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[None]"


class Journal:
    """The files of one server, in a folder of its own below `folder`, which it locks."""

    def __init__(self, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder / f"{_NAME}{new_key()}"
        # locked under another name: a server that cleans up never finds it without its lock
        made = folder / f".{self.folder.name}"
        made.mkdir()
        self._lock = FileLock(made / _LOCK, timeout=0)
        self._lock.acquire()
        made.rename(self.folder)
        sync(folder)
        self._file_bytes = file_bytes
        self._files: list[_File] = []
        self._fd: int | None = None
        self._guard = threading.Lock()
        self._lines: queue.Queue[_Line | None] = queue.Queue(QUEUE_LINES)
        self._thread = threading.Thread(target=self._work, name="rlake-journal", daemon=True)
        self._thread.start()

    async def write(self, key: str, entry: Entry) -> None:
        """Write an entry of a session; when this returns, no kill loses it. Raises OSError."""
        loop = asyncio.get_running_loop()
        line = _Line(key, entry, loop, loop.create_future())
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            raise OSError(f"{QUEUE_LINES:,} lines wait for the disk") from None
        await line.done

    def forget(self, keys: set[str]) -> None:
        """Let go of sessions that are stored, and of files that hold no other."""
        with self._guard:
            for file in self._files:
                file.keys -= keys
            gone = [f for f in self._files if not f.keys and f is not self._files[-1]]
            self._files = [f for f in self._files if f not in gone]
        for file in gone:
            try:
                file.path.unlink(missing_ok=True)
            except OSError as error:  # the next server finds its sessions stored, and tries again
                _log.warning("`%s` cannot be removed: %s", file.path, error)

    @property
    def nbytes(self) -> int:
        """What all its files hold."""
        with self._guard:
            return sum(file.nbytes for file in self._files)

    def close(self) -> None:
        """End; the folder goes when all of it is stored."""
        self._lines.put(None)
        self._thread.join()
        if self._fd is not None:
            os.close(self._fd)
        is_stored = not any(file.keys for file in self._files)
        self._lock.release()
        if is_stored:
            _remove(self.folder)

    def _work(self) -> None:
        while (first := self._lines.get()) is not None:
            lines, ends = [first], False
            while not self._lines.empty() and len(lines) < QUEUE_LINES:
                other = self._lines.get()
                if other is None:
                    ends = True
                    break
                lines.append(other)
            self._write(lines)
            if ends:
                return

    def _write(self, lines: list[_Line]) -> None:
        texts: list[bytes] = []
        written: list[_Line] = []
        for line in lines:
            try:
                texts.append(json.dumps(line.entry()).encode() + b"\n")
                written.append(line)
            except Exception as error:  # noqa: BLE001 - whoever waits for the line is told
                _tell([line], error)
        try:
            file = self._file(sum(map(len, texts)))
            with self._guard:
                file.keys |= {line.key for line in written}
            _write_all(self._descriptor(file), b"".join(texts))
        except OSError as error:
            _log.error("the journal `%s` cannot be written: %s", self.folder, error)
            self._give_up_file()
            _tell(written, error)
        else:
            _tell(written, None)

    def _file(self, nbytes: int) -> _File:
        """Return the file for so many bytes more."""
        with self._guard:
            last = self._files[-1] if self._files else None
            # a file of which all is stored is left before it is large
            enough = 1 << 20 if last is not None and not last.keys else self._file_bytes
            if last is None or last.nbytes > enough or self._fd is None:
                if self._fd is not None:
                    os.close(self._fd)
                    self._fd = None
                number = 1 + (last.number if last else 0)
                last = _File(self.folder / f"{number:08d}.jsonl", number)
                self._files.append(last)
            last.nbytes += nbytes
            return last

    def _descriptor(self, file: _File) -> int:
        if self._fd is None:
            # a write that syncs, since each call that lets go of the GIL waits to have it again
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_DSYNC
            self._fd = os.open(file.path, flags, 0o600)
            sync(self.folder)
        return self._fd

    def _give_up_file(self) -> None:
        """Go on in another file: half a line may stand in this one."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _tell(lines: Sequence[_Line], error: BaseException | None) -> None:
    """Wake up who waits for lines, all of an event loop at once: the writer waits for the GIL."""
    waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for line in lines:
        waiting.setdefault(line.loop, []).append(line.done)
    for loop, those in waiting.items():
        with suppress(RuntimeError):  # their loop ended, and nobody waits any more
            loop.call_soon_threadsafe(_settle, those, error)


def _settle(waiting: "Sequence[asyncio.Future[None]]", error: BaseException | None) -> None:
    for one in waiting:
        if one.done():
            continue
        if error is None:
            one.set_result(None)
        else:
            one.set_exception(error)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@dataclass(frozen=True)
class Left:
    """What a server that is gone left behind.

    A line that is half written was never answered, and is passed over.
    """

    folder: Path

    def keys(self) -> set[str]:
        """Return the keys of all its sessions."""
        return {entry["key"] for entry in _entries(self.folder)}

    def entries(self, *, stored: Collection[str] = ()) -> Iterator[dict[str, Any]]:
        """Yield its entries, but for the turns of sessions that are stored."""
        for entry in _entries(self.folder):
            if "feedback" in entry or entry["key"] not in stored:
                yield entry


def left_behind(folder: Path) -> Iterator[Left]:
    """Yield what servers that are gone left; its folder goes when it is done."""
    for path in sorted(p for p in folder.glob(f"{_NAME}*") if p.is_dir()):
        try:
            with FileLock(path / _LOCK, timeout=0):
                yield Left(path)
                _remove(path)
        except (Timeout, FileNotFoundError):  # its server lives, or another one cleans up
            continue


def _remove(folder: Path) -> None:
    """Remove a journal's own files, and the folder when that was all."""
    for path in [*folder.glob("*.jsonl"), folder / _LOCK]:
        path.unlink(missing_ok=True)
    with suppress(OSError):  # something else lies there
        folder.rmdir()


def _entries(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as lines:
            for number, line in enumerate(lines):
                try:
                    yield json.loads(line)
                except ValueError:
                    _log.warning("`%s`: line %d was not finished; passed over", path, number + 1)
