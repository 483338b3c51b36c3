"""Pipeline runs and imports: their rows in `lineage`, and which of them stored a row."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..query import QuerySession, literal
from ..tables import Tables

Row = dict[str, Any]


def pipeline_run(
    lineage_id: str,
    *,
    pipeline: str,
    source: str,
    sink: str,
    rows_in: int,
    rows_out: int,
    rows_dropped: int = 0,
    read: Mapping[str, int] | None = None,
    written: Mapping[str, int] | None = None,
    **others: Any,
) -> Row:
    """Return the row of `lineage` of a run that read and wrote these versions of tables."""
    return {
        "lineage_id": lineage_id,
        "pipeline": pipeline,
        "source": source,
        "sink": sink,
        "operators": [],
        "source_versions": [{"name": n, "version": v} for n, v in (read or {}).items()],
        "sink_versions": [{"name": n, "version": v} for n, v in (written or {}).items()],
        "rows_in": rows_in,
        "rows_out": rows_out,
        "rows_dropped": rows_dropped,
        **others,
    }


class Asked:
    """Questions to the store as it was when the first one was asked."""

    def __init__(self, store: Tables) -> None:
        self._console = QuerySession()
        self._console.show(store.versions(), store.open_at)

    def __call__(self, query: str) -> list[Row]:
        """Return the rows of a SELECT."""
        return self._console.sql(query).to_arrow_table().to_pylist()


def maker(ask: Asked, experience_id: str) -> Row | None:
    """Return the pipeline run or import that stored an experience; None when none did."""
    found = ask(
        "SELECT lineage_id, l.pipeline, l.source, l.operators, l.created_at "
        "FROM experiences e JOIN lineage l USING (lineage_id) "
        f"WHERE experience_id = {literal(experience_id)}"
    )
    return {**found[0], "operators": named(found[0]["operators"])} if found else None


def named(operators: Iterable[Row] | None) -> list[str]:
    """Write operators as `name(parameter=value)`, with the beginning of their fingerprints."""
    named = []
    for op in operators or ():
        params = ", ".join(f"{k}={v!r}" for k, v in json.loads(op["params"]).items())
        named.append(f"{op['name']}({params}) {op['fingerprint'][:8]}")
    return named
