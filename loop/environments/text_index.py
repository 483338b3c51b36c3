"""BM25 search over a small table, for environments in which policies search."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lance
import polars as pl
import pyarrow as pa

from ...operators.import_path import find_function, taken_apart
from ...store.errors import ConfigError

TableSpec = str | Mapping[str, Mapping[str, Any] | None]
"""A file (.parquet or .jsonl), or `{package.module:function: {parameter: value}}`."""


class TextIndex:
    """The rows of a table, which are searched by the words of one column."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, key: str, text: str) -> None:
        """Index the column `text` of rows that `key` identifies."""
        self.rows = {str(row[key]): dict(row) for row in rows}
        columns = {"key": list(self.rows), "text": [str(row[text]) for row in self.rows.values()]}
        self._dataset = lance.write_dataset(pa.table(columns), "memory://")
        self._dataset.create_scalar_index("text", "INVERTED")

    def search(self, words: str, *, most: int) -> list[dict[str, Any]]:
        """Return the rows that match the words best, best first; equally good ones by their keys.

        >>> rows = [{"id": 1, "t": "a mug"}, {"id": 2, "t": "a lamp"}]
        >>> TextIndex(rows, key="id", text="t").search("mug", most=3)
        [{'id': 1, 't': 'a mug'}]
        """
        if not words.strip():
            return []
        found = self._dataset.to_table(
            columns=["key", "_score"],
            full_text_query=lance.query.MatchQuery(words, "text"),
            limit=len(self.rows),
        )
        ranked = sorted((-row["_score"], row["key"]) for row in found.to_pylist())
        return [self.rows[key] for _, key in ranked[:most]]


def table_rows(spec: TableSpec, *, needs: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a table. Raises ConfigError if it cannot be read or lacks a column."""
    if isinstance(spec, str) and ":" not in spec:
        rows = _read(Path(spec).expanduser())
    else:
        name, given = taken_apart(spec, "a table")
        rows = list(find_function(name, None, "table")(**given))
    missing = [name for name in needs if not rows or name not in rows[0]]
    if missing:
        raise ConfigError(
            f"the table `{spec}` has no column `{missing[0]}`; expected {', '.join(needs)}"
        )
    return rows


def _read(path: Path) -> list[dict[str, Any]]:
    readers = {".parquet": pl.read_parquet, ".jsonl": pl.read_ndjson}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(f"`{path}` cannot be read; expected one of {', '.join(readers)}")
    try:
        return reader(path).to_dicts()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ConfigError(f"`{path}` cannot be read: {str(error).splitlines()[0]}") from error
