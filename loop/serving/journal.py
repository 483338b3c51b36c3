"""The journal of `rlake serve`: answered turns that are not stored yet, as JSON lines on disk.

`Journal.write` returns when its line is on the disk; lines that arrive together share one sync. A
file is removed when the sessions of all its lines are stored. A killed server leaves its folder
behind, and the next server stores what is in it.
"""

import asyncio
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import TypeAdapter

from ...store.files.atomic_writer import sync
from ..chat_api.sessions import Session, new_key
from ..inference.policy import Completion, Turn

FILE_BYTES = 4 << 20
"""Size from which a file is followed by another; at most this much stays after all is stored."""
QUEUE_LINES = 10_000
_LOCK = ".lock"
_NAME = "journal-"
"""Prefix of the folders; the journal never reads or removes anything else."""

_log = logging.getLogger(__name__)

Entry = Callable[[], Mapping[str, Any]]
"""Makes an entry; called in the journal's thread."""
_COMPLETIONS = TypeAdapter(list[Completion])


@dataclass
class _File:
    path: Path
    nbytes: int = 0
    keys: set[str] = field(default_factory=set)
    """Keys of the sessions in it that are not stored."""


@dataclass
class _Line:
    key: str
    entry: Entry
    done: "asyncio.Future[None]"


class Journal:
    """The files of one server, in a locked folder below `folder`."""

    def __init__(self, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder / f"{_NAME}{new_key()}"
        # Locked under another name first: a server that recovers must never find it unlocked.
        made = folder / f".{self.folder.name}"
        made.mkdir()
        self._lock = FileLock(made / _LOCK, timeout=0)
        self._lock.acquire()
        made.rename(self.folder)
        sync(folder)
        self._file_bytes = file_bytes
        self._files: list[_File] = []
        self._opened = 0
        self._fd: int | None = None
        self._guard = threading.Lock()
        self._lines: queue.Queue[_Line | None] = queue.Queue(QUEUE_LINES)
        self._thread = threading.Thread(target=self._work, name="rlake-journal", daemon=True)
        self._thread.start()

    async def write(self, key: str, entry: Entry) -> None:
        """Write an entry of a session; once this returns, no kill loses it.

        All calls come from one event loop. Raises OSError.
        """
        line = _Line(key, entry, asyncio.get_running_loop().create_future())
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            raise OSError(f"{QUEUE_LINES:,} lines wait for the disk") from None
        await line.done

    def forget(self, keys: set[str]) -> None:
        """Forget sessions that are stored, and remove the files that hold no others."""
        with self._guard:
            for file in self._files:
                file.keys -= keys
            # The last file is still written to.
            removed = [file for file in self._files[:-1] if not file.keys]
            self._files = [file for file in self._files if file not in removed]
        for file in removed:
            try:
                file.path.unlink(missing_ok=True)
            except OSError as error:  # the next server finds its sessions stored and removes it
                _log.warning("cannot remove `%s`: %s", file.path, error)

    def close(self) -> None:
        """Stop; remove the folder if all of it is stored."""
        self._lines.put(None)
        self._thread.join()
        self._close_file()
        self._lock.release()
        if not any(file.keys for file in self._files):
            _remove(self.folder)

    def _work(self) -> None:
        is_open = True
        while is_open:
            lines = [self._lines.get()]
            while not self._lines.empty():
                lines.append(self._lines.get())
            is_open = None not in lines
            self._write([line for line in lines if line is not None])

    def _write(self, lines: list[_Line]) -> None:
        texts: list[bytes] = []
        written: list[_Line] = []
        for line in lines:
            try:
                texts.append(to_line(line.entry()))
                written.append(line)
            except Exception as error:  # noqa: BLE001 - raised to the caller that waits for the line
                _settle([line], error)
        try:
            self._append(b"".join(texts), {line.key for line in written})
        except OSError as error:
            _log.error("the journal `%s` cannot be written: %s", self.folder, error)
            self._close_file()  # it may end in half a line: the next one starts another file
            _settle(written, error)
        else:
            _settle(written, None)

    def _append(self, data: bytes, keys: set[str]) -> None:
        if self._fd is not None and self._files[-1].nbytes > self._file_bytes:
            self._close_file()
        if self._fd is None:
            self._opened += 1
            path = self.folder / f"{self._opened:08d}.jsonl"
            # O_DSYNC syncs within the write: a second call would have to wait for the GIL again.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_DSYNC
            self._fd = os.open(path, flags, 0o600)
            sync(self.folder)
            with self._guard:
                self._files.append(_File(path))
        file = self._files[-1]
        with self._guard:
            # Before the write, which may fail half-way: whatever is in the file must be known.
            file.keys |= keys
        file.nbytes += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _settle(lines: Sequence[_Line], error: Exception | None) -> None:
    """End the waits for lines with one wake-up: each one makes this thread wait for the GIL."""

    def settle() -> None:
        for line in lines:
            if line.done.done():  # cancelled
                continue
            if error is None:
                line.done.set_result(None)
            else:
                line.done.set_exception(error)

    if lines:
        with suppress(RuntimeError):  # the event loop is closed, and with it all callers
            lines[0].done.get_loop().call_soon_threadsafe(settle)


def left_behind(folder: Path) -> Iterator[Path]:
    """Yield the folders of servers that are gone, locked; each is removed after its turn."""
    for path in sorted(p for p in folder.glob(f"{_NAME}*") if p.is_dir()):
        try:
            with FileLock(path / _LOCK, timeout=0):
                yield path
                _remove(path)
        except (Timeout, FileNotFoundError):  # its server is alive, or another one recovers it
            continue


def entries_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a folder, in order.

    A line that was cut off by a kill is skipped: its turn was never answered.
    """
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield json.loads(line)
                except ValueError:
                    _log.warning("`%s`: line %d is incomplete; skipped", path, number)


def _remove(folder: Path) -> None:
    """Remove a journal's own files, and the folder if nothing else is in it."""
    for path in [*folder.glob("*.jsonl"), folder / _LOCK]:
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def set_aside(folder: Path, session: Session) -> Path:
    """Write a session that the store refuses to a file of its own; return the file."""
    pairs = zip(session.responses, session.turns, strict=True)
    entries: list[Mapping[str, Any]] = [
        session_entry(session, [turn for _, turn in same], name)
        for name, same in groupby(pairs, key=lambda pair: pair[0])
    ]
    entries.append({"key": session.key, "feedback": session.feedback})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"refused-{session.key}.jsonl"
    path.write_bytes(b"".join(map(to_line, entries)))
    return path


def session_entry(session: Session, turns: Sequence[Turn], response_id: str) -> dict[str, Any]:
    """Return the entry of one request's turns, which share their messages."""
    return {
        "key": session.key,
        "session": session.id,
        "group": session.group_id,
        "response": response_id,
        "messages": turns[0].messages,
        "tools": turns[0].tools,
        "completions": [turn.completion for turn in turns],
    }


def to_line(entry: Mapping[str, Any]) -> bytes:
    """Return an entry as a line of JSON."""
    return json.dumps(entry, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    return vars(value) if is_dataclass(value) else list(value)


def sessions_of(entries: Iterable[Mapping[str, Any]]) -> list[Session]:
    """Return the sessions of entries, each with all its turns and feedback."""
    found: dict[str, Session] = {}
    for entry in entries:
        key = entry["key"]
        if key not in found:
            found[key] = Session(id=entry.get("session", key), key=key, group_id=entry.get("group"))
        session = found[key]
        if "feedback" in entry:
            session.feedback += entry["feedback"]
            continue
        completions = _COMPLETIONS.validate_python(entry["completions"])
        session.responses += [entry["response"]] * len(completions)
        session.turns += [
            Turn(messages=entry["messages"], tools=entry["tools"], completion=one)
            for one in completions
        ]
    return list(found.values())
