"""Interrupts: the first Ctrl-C or SIGTERM ends a command within two seconds.

Python raises KeyboardInterrupt in the main thread only, and not while it runs a library's code. So
a thread receives the signal too, and ends the process if the main thread does not: appends are
atomic and files are renamed when they are complete, so nothing is left half-written. While a
library reads rows from our iterators, raising would pull them from under it: then the process ends
at once.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

GRACE_SECONDS = 1.2
"""Time for the main thread to end by itself, in seconds."""
_LAST_SECONDS = 0.6
"""Time for the callbacks of `last_words`, which write a row to `job_events`, in seconds."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"

_received: list[int] = []
"""Signals received so far."""
_last_words: list[Callable[[], object]] = []
_at_once: list[object] = []


def listen() -> None:
    """Install the handlers described above; must be called from the main thread."""
    if signal.getsignal(signal.SIGINT) is _raise:
        return
    reader, wakes = os.pipe()
    # a full pipe must not block the signal handler
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, _raise)
    threading.Thread(target=_watch, args=(reader,), name="rlake-signals", daemon=True).start()


def exit_code() -> int:
    """Return the exit code after an interrupt: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (_received[0] if _received else signal.SIGINT)


def caused(error: BaseException) -> bool:
    """Return whether an interrupt caused an error.

    DuckDB handles SIGINT itself while a query runs, so our handlers are not called.
    """
    by_library = ("KeyboardInterrupt", "Query interrupted")
    return (
        bool(_received)
        or isinstance(error, KeyboardInterrupt)
        or any(text in str(error) for text in by_library)
    )


@contextmanager
def passed_on(error: BaseException) -> Iterator[None]:
    """Within the block, errors of other threads count as caused by an interrupt if this one is."""
    mine = [signal.SIGINT] if caused(error) and not _received else []
    _received.extend(mine)
    try:
        yield
    finally:
        for number in mine:
            _received.remove(number)


@contextmanager
def last_words(call: Callable[[], object]) -> Iterator[None]:
    """Call `call` if an interrupt ends the process within the block."""
    _last_words.append(call)
    try:
        yield
    finally:
        _last_words.remove(call)


@contextmanager
def at_once() -> Iterator[None]:
    """End the process at once on an interrupt within the block."""
    mark = object()
    _at_once.append(mark)
    try:
        yield
    finally:
        _at_once.remove(mark)


def _raise(number: int, _frame: FrameType | None) -> None:
    if not _received:
        _received.append(number)
    if not _at_once:
        raise KeyboardInterrupt


def _is_ours(number: int) -> bool:
    """Return whether we handle the signal; `serve` and processes of torchrun do it themselves.

    The handler that asyncio installs counts as ours: it raises KeyboardInterrupt later.
    """
    handler = signal.getsignal(number)
    return handler in (_raise, signal.default_int_handler) or isinstance(handler, partial)


def _watch(reader: int) -> None:
    while True:
        number = os.read(reader, 1)[0]
        if number not in _SIGNALS or not _is_ours(number):
            continue
        if not _received:
            _received.append(number)
        if not _at_once:
            threading.Event().wait(GRACE_SECONDS)
        _end()


def _end() -> None:
    """End the process from a thread, after the callbacks of `last_words`."""
    # in a thread, so that a callback that hangs cannot delay the exit
    callbacks = threading.Thread(target=_run_callbacks, daemon=True)
    callbacks.start()
    callbacks.join(_LAST_SECONDS)
    with suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write(_SHOW_CURSOR)
        os.write(2, b"error: interrupted\n")
    os._exit(exit_code())


def _run_callbacks() -> None:
    for call in reversed(_last_words):
        call()
