"""The console in a terminal: lines are edited, completed and remembered; Ctrl-C ends a query."""

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType

from ...store import interrupts
from ...store.schema import TABLES
from .completion import DELIMITERS, candidates
from .console import Console, Leave
from .exit_codes import INTERRUPTED
from .failures import failed
from .tables import screen

HISTORY_LINES = 10_000
"""Most lines that are remembered."""
_LOOK_SECONDS = 0.1
"""How often a query that was cancelled before it began is interrupted again."""


class Terminal:
    """A person at a console: reads lines until they leave."""

    def __init__(self, console: Console) -> None:
        self._console = console
        console.more = "see more with `.rows N`, all with `.mode`"
        self._presses = 0
        """How often Ctrl-C was pressed since the last line."""
        self._is_busy = False
        self._found: list[str] = []

    def run(self) -> None:
        """Read lines and run them until `.quit`, Ctrl-D, or Ctrl-C twice."""
        screen().print(f"Store {self._console.lake.uri}; `.help` lists commands", style="dim")
        # Queries run in a thread, or a signal would wait until DuckDB returns.
        with self._edited_lines(), self._interrupts(), ThreadPoolExecutor(1) as worker:
            while True:
                try:
                    line = input(self._prompt())
                    self._presses = 0
                    self._run(worker.submit(self._console.feed, line))
                except (EOFError, Leave):
                    return
                except KeyboardInterrupt:
                    if self._gives_up():
                        return

    def _prompt(self) -> str:
        snapshot = self._console.snapshot
        name = f"rlake@{snapshot}" if snapshot else "rlake"
        return f"{'...':>{len(name)}}> " if self._console.pending else f"{name}> "

    def _run(self, work: Future[None]) -> None:
        self._is_busy = True
        try:
            while wait([work], timeout=_LOOK_SECONDS).not_done:
                # again and again: before the query has begun, it has no effect
                if self._presses:
                    self._console.interrupt()
            work.result()
        except Leave:
            raise
        except Exception as error:  # noqa: BLE001  an error ends the statement, not the console
            if self._presses:
                print("cancelled", file=sys.stderr)
            else:
                failed(error)
            # what was typed before the failed statement belongs to it
            self._console.pending = ""
        finally:
            self._is_busy, self._presses = False, 0

    def _gives_up(self) -> bool:
        """Drop the line; return whether Ctrl-C was pressed on an empty one twice, or to end all."""
        print()
        if interrupts.exit_code() != INTERRUPTED:  # SIGTERM
            return True
        if self._console.pending:
            self._console.pending, self._presses = "", 0
        elif self._presses == 1:
            print("Ctrl-C again, Ctrl-D or `.quit` leaves")
        return self._presses > 1

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Within the block, Ctrl-C cancels the query or the line; a second one ends the process."""

        def pressed(_number: int, _frame: FrameType | None) -> None:
            self._presses += 1
            if not self._is_busy:
                self._presses *= not self._typed()
                raise KeyboardInterrupt
            if self._presses > 1:
                # the query does not end: a disk or a network does not answer
                os._exit(INTERRUPTED)
            self._console.interrupt()

        before = signal.signal(signal.SIGINT, pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    # lines

    @contextmanager
    def _edited_lines(self) -> Iterator[None]:
        """Within the block, `input` edits, completes and remembers lines."""
        try:
            import readline
        except ImportError:  # Windows: its own console edits lines
            yield
            return
        # macOS has another library under the same name
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        readline.set_completer_delims(DELIMITERS)
        readline.set_completer(self._complete)
        history = history_file()
        with suppress(OSError):  # the first time, or a home that cannot be written
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.read_history_file(history)
        readline.set_history_length(HISTORY_LINES)
        try:
            yield
        finally:
            readline.set_completer(None)
            with suppress(OSError):
                readline.write_history_file(history)

    @staticmethod
    def _typed() -> str:
        """Return the line so far."""
        with suppress(ImportError):
            import readline

            return readline.get_line_buffer()
        return ""

    def _complete(self, word: str, index: int) -> str | None:
        """Return a completion for readline, which asks for one after the other."""
        import readline

        if index == 0:
            line = readline.get_line_buffer()[: readline.get_endidx()]
            self._found = candidates(f"{self._console.pending}{line}", word, self._columns)
        return self._found[index] if index < len(self._found) else None

    def _columns(self, name: str) -> list[str]:
        return list(TABLES[name].names) if name in TABLES else _columns_of_view(self._console, name)


@cache
def _columns_of_view(console: Console, name: str) -> list[str]:
    return console.lake.sql(f"SELECT * FROM {name}").columns


def history_file() -> Path:
    """Return where the lines of consoles are remembered, in the user's folder of states."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "rlake" / "sql_history"
