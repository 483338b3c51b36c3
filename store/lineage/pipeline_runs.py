"""Which pipeline run stored or derived a row, told from the table versions that it made."""

import json
from collections.abc import Iterable
from typing import Any

import polars as pl
import pyarrow as pa

from ..query import QuerySession, literal
from ..store import Store

Row = dict[str, Any]


class Asked:
    """Questions to the store as it was when the first one was asked."""

    def __init__(self, store: Store) -> None:
        self._console = QuerySession()
        self._console.show(store.versions(), store.open_at)

    def __call__(self, query: str, **tables: pa.Table) -> list[Row]:
        """Return the rows of a SELECT, which may read `tables` of rows in memory too."""
        for name, rows in tables.items():
            self._console.put(name, rows)
        return self._console.sql(query).to_arrow_table().to_pylist()


def made(ask: Asked, store: Store) -> pa.Table:
    """Return the experiences that pipelines stored, each with its `lineage_id`."""
    makers = _makers(ask)
    found = store.dataset("experiences").to_table(
        columns=["experience_id", "_row_created_at_version"],
        filter=f"_row_created_at_version IN ({', '.join(map(str, makers)) or '0'})",
    )
    rows = pl.DataFrame(pl.from_arrow(found))
    by = pl.col("_row_created_at_version").cast(pl.Int64)
    lineage_id = by.replace_strict(
        {v: m["lineage_id"] for v, m in makers.items()}, return_dtype=pl.String
    )
    return rows.select("experience_id", lineage_id=lineage_id).to_arrow()


def _makers(ask: Asked) -> dict[int, Row]:
    """Return the pipeline runs that stored experiences, by the version of the table they made."""
    runs = ask(
        "SELECT lineage_id, pipeline, source, operators, sink_versions, created_at FROM lineage "
        "WHERE rows_out > 0"
    )
    return {
        made["version"]: run
        for run in runs
        for made in run["sink_versions"]
        if made["name"] == "experiences"
    }


def maker(ask: Asked, store: Store, experience_id: str) -> Row | None:
    """Return the pipeline run that stored an experience; None when no pipeline did."""
    found = store.dataset("experiences").to_table(
        columns=["_row_created_at_version"], filter=f"experience_id = {literal(experience_id)}"
    )
    row = _makers(ask).get(found.column("_row_created_at_version")[0].as_py())
    if row is None:
        return None
    shown = {k: row[k] for k in ("lineage_id", "pipeline", "source", "created_at")}
    return shown | {"operators": named(row["operators"])}


def named(operators: Iterable[Row] | None) -> list[str]:
    """Write operators as `name(parameter=value)`, with the beginning of their fingerprints."""
    named = []
    for op in operators or ():
        params = ", ".join(f"{k}={v!r}" for k, v in json.loads(op["params"]).items())
        named.append(f"{op['name']}({params}) {op['fingerprint'][:8]}")
    return named
