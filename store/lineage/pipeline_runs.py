"""Which pipeline run stored a row, told from the `lineage_id` that the row has."""

import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from ..query import QuerySession, literal
from ..store import Store

Row = dict[str, Any]
_MADE = pa.schema([("experience_id", pa.string()), ("lineage_id", pa.string())])


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


def made(ask: Asked) -> pa.Table:
    """Return the experiences that pipelines and imports stored, each with its `lineage_id`."""
    made = ask(
        "SELECT experience_id, lineage_id FROM experiences SEMI JOIN lineage USING (lineage_id)"
    )
    return pa.Table.from_pylist(made, _MADE)


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
