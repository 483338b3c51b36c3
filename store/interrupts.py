"""Interrupts: the first Ctrl-C or SIGTERM ends a command within two seconds, whatever it does.

Python raises KeyboardInterrupt in the main thread only, and not while that is in a library's code.
So a thread hears the signal too, and ends the process when the main thread does not: appends are
atomic and files get their names when they are whole, so nothing is left half-written. While a
library reads rows of ours, to raise would take them from under it: then the process ends at once.
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
"""How long the main thread has to end by itself."""
_LAST_SECONDS = 0.6
"""How long the last words may take: a row in `job_events`."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"

_told: list[int] = []
"""The signals that came."""
_last_words: list[Callable[[], object]] = []
_at_once: list[object] = []


def listen() -> None:
    """Let this process end by signals as said above; its main thread calls it."""
    if signal.getsignal(signal.SIGINT) is _raise:
        return
    heard, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, _raise)
    threading.Thread(target=_hear, args=(heard,), name="rlake-signals", daemon=True).start()


def exit_code() -> int:
    """Return what a process that was interrupted exits with: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (_told[0] if _told else signal.SIGINT)


def caused(error: BaseException) -> bool:
    """Tell whether an error is what became of an interrupt.

    DuckDB handles SIGINT itself while a query runs, so that no handler of ours hears of it.
    """
    by_library = ("KeyboardInterrupt", "Query interrupted")
    return (
        bool(_told)
        or isinstance(error, KeyboardInterrupt)
        or any(text in str(error) for text in by_library)
    )


@contextmanager
def last_words(call: Callable[[], object]) -> Iterator[None]:
    """Call this when the process has to end before the block does."""
    _last_words.append(call)
    try:
        yield
    finally:
        _last_words.remove(call)


@contextmanager
def at_once() -> Iterator[None]:
    """Let an interrupt end the process at once while a library reads what the block gives it."""
    mark = object()
    _at_once.append(mark)
    try:
        yield
    finally:
        _at_once.remove(mark)


def _raise(number: int, _frame: FrameType | None) -> None:
    if not _told:
        _told.append(number)
    if not _at_once:
        raise KeyboardInterrupt


def _is_ours(number: int) -> bool:
    """Tell whether nobody else handles the signal, as `serve` and processes of torchrun do.

    What asyncio puts there raises KeyboardInterrupt, later.
    """
    handler = signal.getsignal(number)
    return handler in (_raise, signal.default_int_handler) or isinstance(handler, partial)


def _hear(heard: int) -> None:
    while True:
        number = os.read(heard, 1)[0]
        if number not in _SIGNALS or not _is_ours(number):
            continue
        if not _told:
            _told.append(number)
        if not _at_once:
            threading.Event().wait(GRACE_SECONDS)
        _end()


def _end() -> None:
    """End the process from a thread, after the last words."""
    speaking = threading.Thread(target=_speak, daemon=True)
    speaking.start()
    speaking.join(_LAST_SECONDS)
    with suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write(_SHOW_CURSOR)
        os.write(2, b"error: interrupted\n")
    os._exit(exit_code())


def _speak() -> None:
    for call in reversed(_last_words):
        call()
