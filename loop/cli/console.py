"""A console over the store: statements that end in `;`, and commands that begin with a dot."""

import io
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, TextIO

import duckdb

from ...store.errors import ConfigError, NotFoundError, nearest
from ...store.query_scope import QueryScope
from .output_formats import print_table, write_rows
from .stored_tables import print_columns, print_tables
from .tables import print_rows, screen

if TYPE_CHECKING:
    from ...store import Store

MODES = ("table", "csv", "json", "jsonl", "markdown", "line", "parquet")
"""How results are written."""
_DEEPEST = 16
"""Most files that may read each other with `.read`."""


class Leave(Exception):
    """The command `.quit`."""


class Console:
    """Settings of a console, and the statements and commands that it runs, one after the other."""

    def __init__(
        self,
        lake: "Store",
        *,
        mode: str = "table",
        rows: int = 50,
        timeout: float | None = None,
        allow_files: bool = False,
    ) -> None:
        self._now = self.lake = lake
        self.snapshot: str | None = None
        self._mode, self._most_rows, self._timeout = mode, rows, timeout
        self._allow_files = allow_files
        self._has_timer = False
        self._output: Path | None = None
        self._written = 0
        self._depth = 0
        self._scope: QueryScope | None = None
        self.more = "see more with `--rows N`, all with `--format`"
        """What is printed below the first rows of a result that has more."""
        self.pending = ""
        """The beginning of a statement that does not end yet."""

    # statements

    def run(self, script: str) -> None:
        """Run the statements and commands of a text; the last statement needs no `;`.

        Raises what its first error raises.
        """
        # a file of `.read` is whole: it does not continue the statement that is being typed
        outer, self.pending = self.pending, ""
        try:
            for line in script.splitlines():
                self.feed(line)
            rest, self.pending = self.pending, ""
            if not is_blank(rest):
                self._execute(rest)
        except Leave:
            return
        finally:
            self.pending = outer

    def feed(self, line: str) -> None:
        """Take a line, and run the statements that it ends, or the command that it is."""
        if line.startswith(".") and is_blank(self.pending):
            self.pending = ""
            self._command(line)
            return
        statements, rest = split(f"{self.pending}{line}\n")
        # before they run: what follows a failed statement on its line is dropped with it
        self.pending = "" if is_blank(rest) else rest
        for statement in statements:
            self._execute(statement)

    def interrupt(self) -> None:
        """Interrupt the query that another thread runs here."""
        if self._scope is not None:
            self._scope.cancel()

    def _execute(self, statement: str) -> None:
        began = perf_counter()
        self._scope = QueryScope(self._timeout)
        with self._scope:
            relation = self.lake.sql(statement, allow_files=self._allow_files)
            with self._redirected() as out:
                if self._mode == "table":
                    print_table(relation, self._most_rows, more=self.more)
                else:
                    write_rows(relation, out.buffer, self._mode)
        if self._has_timer:
            screen().print(f"Run time: {perf_counter() - began:.3f} s", style="dim")

    @contextmanager
    def _redirected(self) -> Iterator[TextIO]:
        """Write the block's output to the file of `.output`, if there is one."""
        if self._output is None:
            yield sys.stdout
            return
        # its footer stands at the end, so that nothing can be appended
        if self._mode == "parquet" and self._written:
            raise ConfigError("a Parquet file has one result; name another with `.output FILE`")
        with (
            self._output.open("ab" if self._written else "wb") as file,
            io.TextIOWrapper(file, encoding="utf-8", write_through=True) as text,
            # tables are printed, other formats are written: both end up in the file
            redirect_stdout(text),
        ):
            self._written += 1
            yield text

    # commands

    def _command(self, line: str) -> None:
        try:
            name, *words = shlex.split(line[1:]) or [""]
        except ValueError as error:
            raise ConfigError(f"`{line}` cannot be read: {str(error).lower()}") from error
        name = _SHORT.get(name, name)
        if name not in _COMMANDS:
            hint = nearest(f".{name}", COMMANDS) or "; `.help` lists them"
            raise NotFoundError(f"no command `.{name}`{hint}")
        usage, about, call = _COMMANDS[name]
        # optional arguments are in brackets, and stand last
        least, most = len(usage.split()) - usage.count("["), len(usage.split())
        if not least <= len(words) <= most:
            raise ConfigError(f"`.{name}` takes `{usage or 'nothing'}`, got {line!r}; {about}")
        call(self, *words)

    def do_help(self) -> None:
        """List the commands."""
        listed = [
            (f".{name} {usage}".strip(), about) for name, (usage, about, _) in _COMMANDS.items()
        ]
        print_rows(("command", "what it does"), listed)

    def do_quit(self) -> None:
        """Leave."""
        raise Leave

    def do_tables(self) -> None:
        """List the tables, views and macros."""
        print_tables(self.lake)

    def do_schema(self, name: str) -> None:
        """Describe the columns of a table or view."""
        print_columns(self.lake, name)

    def do_mode(self, mode: str | None = None) -> None:
        """Write results in another format, or print which it is."""
        if mode is None:
            print(self._mode)
        elif mode not in MODES:
            raise ConfigError(f"no mode `{mode}`{nearest(mode, MODES)}; one of {', '.join(MODES)}")
        else:
            self._mode = mode

    def do_output(self, file: str | None = None) -> None:
        """Write results to a file, or on the screen again."""
        self._output, self._written = None if file is None else Path(file).expanduser(), 0

    def do_timer(self, value: str) -> None:
        """Say how long each query took, or no longer."""
        if value not in ("on", "off"):
            raise ConfigError(f"`.timer` takes `on` or `off`, got `{value}`")
        self._has_timer = value == "on"

    def do_timeout(self, seconds: str) -> None:
        """Cancel queries that take longer."""
        self._timeout = None if seconds == "off" else _number(seconds, "`.timeout`", 0.001)

    def do_rows(self, rows: str) -> None:
        """Show at most this many rows of a table."""
        self._most_rows = int(_number(rows, "`.rows`", 1))

    def do_read(self, file: str) -> None:
        """Run the statements of a file."""
        from ...store.files.yaml_text import read_text

        if self._depth == _DEEPEST:
            raise ConfigError(f"`{file}` is read by {_DEEPEST} files that read each other")
        self._depth += 1
        try:
            self.run(read_text(Path(file).expanduser()))
        finally:
            self._depth -= 1

    def do_at(self, snapshot: str | None = None) -> None:
        """Read the store as it was at a snapshot, or as it is now."""
        # both before either is kept: a snapshot that does not exist changes nothing
        self.lake = self._now if snapshot in (None, "now") else self._now.at(str(snapshot))
        self.snapshot = None if snapshot == "now" else snapshot


_COMMANDS: dict[str, tuple[str, str, Callable[..., None]]] = {
    "help": ("", "List these commands.", Console.do_help),
    "quit": ("", "Leave; so do `.exit` and Ctrl-D.", Console.do_quit),
    "tables": ("", "List the tables, views and macros.", Console.do_tables),
    "schema": ("TABLE", "Describe the columns of a table or view.", Console.do_schema),
    "mode": ("[MODE]", f"Write results as {', '.join(MODES)}.", Console.do_mode),
    "output": ("[FILE]", "Write results to a file; without one, here again.", Console.do_output),
    "rows": ("N", "Show at most this many rows of a table.", Console.do_rows),
    "read": ("FILE", "Run the statements of a file.", Console.do_read),
    "at": ("[SNAPSHOT]", "Read the store as it was at a snapshot; `now`: as it is.", Console.do_at),
    "timer": ("on|off", "Say how long each query took.", Console.do_timer),
    "timeout": ("SECONDS|off", "Cancel queries that take longer.", Console.do_timeout),
}
"""Commands: their arguments, what they do, and the method that does it."""
COMMANDS = tuple(f".{name}" for name in _COMMANDS)
_SHORT = {"exit": "quit", "q": "quit", "h": "help"}


def split(text: str) -> tuple[list[str], str]:
    """Return the statements of a text that end in `;`, and what follows the last of them.

    >>> split("SELECT ';' -- ;\\n; SELECT")
    (["SELECT ';' -- ;\\n;"], ' SELECT')
    """
    # the places that the tokenizer gives are in bytes
    code, start, statements = text.encode(), 0, []
    for place, _ in duckdb.tokenize(text) if ";" in text else ():
        if code[place : place + 1] == b";":
            statement = code[start : place + 1].decode()
            if not is_blank(statement.removesuffix(";")):
                statements.append(statement)
            start = place + 1
    return statements, code[start:].decode()


def is_blank(text: str) -> bool:
    """Return whether a text is only blanks and comments."""
    return all(kind == duckdb.token_type.comment for _, kind in duckdb.tokenize(text))


def _number(text: str, what: str, least: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    # so written, it refuses NaN too
    if not number >= least:
        raise ConfigError(f"{what} takes a number of at least {least}, got `{text}`")
    return number
