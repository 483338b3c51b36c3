"""Which pipeline run stored a row, by the `lineage_id` of the row."""

import json
from collections.abc import Iterable
from typing import Any

from ..query import QuerySession, literal
from ..tables import Tables

Row = dict[str, Any]


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
