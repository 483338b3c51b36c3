"""What may follow in a line of the console: commands, keywords, tables, columns, functions."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import duckdb

from ...store.schema import TABLES
from .console import COMMANDS, MODES
from .stored_tables import MACROS, VIEWS

DELIMITERS = " \t\n\"'`()[]{}<>=!,;+-*/%^&|~:"
"""What ends a word; a dot does not: `experiences.re` is one."""


def candidates(text: str, word: str, columns_of: Callable[[str], Sequence[str]]) -> list[str]:
    """Return what `word`, the last of a statement so far, may become.

    `columns_of` gives the columns of a table or view. Those of tables that the statement names
    are offered; of all tables where it names none.
    """
    if text.startswith("."):
        return _arguments(text, word)
    if not word:
        return []
    names = [*TABLES, *VIEWS]
    named = [n for n in names if n in set(re.findall(r"\w+", text.lower()))]
    columns = {c: None for name in named or TABLES for c in columns_of(name)}
    table, dot, _ = word.rpartition(".")
    if dot:
        found = columns_of(table) if table in names else columns
        return _starting(word, [f"{table}.{column}" for column in found])
    macros = [macro.partition("(")[0] for macro in MACROS]
    keywords, functions = _words()
    written = [k.upper() for k in keywords] if word[:1].isupper() else keywords
    return _starting(word, [*columns, *names, *macros, *written, *functions])


def _arguments(text: str, word: str) -> list[str]:
    command, blank, _ = text.partition(" ")
    if not blank:
        return _starting(word, COMMANDS)
    offered = {
        ".mode": MODES,
        ".schema": [*TABLES, *VIEWS],
        ".timer": ("on", "off"),
        ".timeout": ("off",),
        ".at": ("now",),
    }
    return _starting(word, offered.get(command, ()))


def _starting(word: str, names: Iterable[str]) -> list[str]:
    return sorted({n for n in names if n.lower().startswith(word.lower())})


@cache
def _words() -> tuple[list[str], list[str]]:
    """Return DuckDB's keywords, and the names of its functions."""
    with duckdb.connect(":memory:") as con:
        keywords = con.sql("SELECT keyword_name FROM duckdb_keywords()").fetchall()
        functions = con.sql(
            "SELECT DISTINCT function_name FROM duckdb_functions() "
            "WHERE regexp_matches(function_name, '^[a-z]\\w*$')"
        ).fetchall()
    return [k for (k,) in keywords], [f for (f,) in functions]
