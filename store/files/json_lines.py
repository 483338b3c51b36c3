"""Lines of JSON that DuckDB reads by itself: objects of texts, numbers and truth values.

Its values of these are those that the lines have, and take a thirtieth of the time of splitting
each line in Python, as everything else in JSON must be to stay byte for byte.
"""

from collections.abc import Mapping
from typing import Any

import duckdb

from ..query import literal, quoted
from .select_columns import JSON_COLUMNS

_PLAIN = ("varchar", "bigint", "double", "boolean")
_SPELLED = (*JSON_COLUMNS, "created_at")
"""Columns whose values are not what JSON has them as, but what their text says."""
_LONG = 1e15
"""The least number of 16 digits, above which a float may round a whole number."""


def reading(path: str, types: Mapping[str, Any]) -> str:
    """Return the SQL that reads these keys of a file's lines; `path` is quoted already."""
    columns = struct({name: str(kind) for name, kind in types.items()})
    return f"read_json({path}, format = 'newline_delimited', columns = {columns})"


def are_plain(con: duckdb.DuckDBPyConnection, path: str, types: Mapping[str, Any]) -> bool:
    """Return whether the values of each key are of one type without parts."""
    if not all(k.id in _PLAIN and n not in _SPELLED for n, k in types.items()):
        return False
    # DuckDB calls it text where numbers and truth values mix; those must stay byte for byte
    texts = [name for name, kind in types.items() if kind.id == "varchar"]
    others = " OR ".join(f"NOT starts_with({quoted(name)}::VARCHAR, '\"')" for name in texts)
    rows = reading(path, dict.fromkeys(texts, "JSON"))
    return not texts or not con.execute(f"SELECT 1 FROM {rows} WHERE {others} LIMIT 1").fetchall()


def may_be_long(con: duckdb.DuckDBPyConnection, path: str, name: str) -> bool:
    """Return whether a key has numbers so large that a float may round whole ones."""
    rows, value = reading(path, {name: "DOUBLE"}), quoted(name)
    found = f"SELECT 1 FROM {rows} WHERE abs({value}) >= {_LONG} LIMIT 1"
    return bool(con.execute(found).fetchall())


def struct(types: Mapping[str, str]) -> str:
    """Return the SQL of a struct of texts."""
    return "{" + ", ".join(f"{literal(n)}: {literal(t)}" for n, t in types.items()) + "}"
