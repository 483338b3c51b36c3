"""Watch a source: run a pipeline whenever the source gets new rows."""

import math
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..store import Store
from ..store.errors import ConfigError, StarvedError
from .incremental import new_rows
from .report import Report
from .source import OF_RUNS, Sql, Table, describe, tables_read

if TYPE_CHECKING:
    from .pipeline import Pipeline


def watch(
    pipeline: "Pipeline",
    store: Store,
    *,
    until_idle: float | None = None,
    stop: threading.Event | None = None,
    **how: Any,
) -> Iterator[Report]:
    """Run a pipeline now and whenever its source has new rows; yield the report of each run.

    It ends when `stop` is set, or nothing came for `until_idle` seconds. Runs without new rows are
    not reported. `how` goes to `Pipeline.run`. Another process may run the same pipeline at the
    same time: the results of both have the same ids, and are stored once.

    Raises ConfigError for a pipeline without a sink, or whose source is not in the store, and what
    `run` raises.
    """
    tables, plan = _watched(pipeline), pipeline.plan()
    while True:
        seen = _versions(store, tables)  # before the run, or rows that come during it are missed
        if not new_rows(pipeline, plan, store.at(store.versions())).is_nothing:
            yield pipeline.run(store, **how)
        try:
            store.wait_for(
                lambda: _versions(store, tables) != seen or None,  # noqa: B023 - called at once
                tables=tables,
                seconds=math.inf if until_idle is None else until_idle,
                describe=lambda: f"nothing came to {', '.join(tables)}",
                stop=stop,
            )
        except StarvedError:
            return


def _watched(pipeline: "Pipeline") -> list[str]:
    if not isinstance(pipeline.source, Table | Sql):
        raise ConfigError(
            f"`{pipeline.name}` reads {describe(pipeline.source)}, and only tables of the store "
            "are watched; import the rows, and let it read the table"
        )
    if pipeline.sink is None:
        raise ConfigError(
            f"`{pipeline.name}` has no sink; say where `watch` shall store what it makes"
        )
    tables = tables_read(pipeline.source) - OF_RUNS  # else each run would start the next
    if not tables:
        raise ConfigError(f"`{pipeline.name}` reads only what runs of pipelines write themselves")
    return sorted(tables)


def _versions(store: Store, tables: list[str]) -> dict[str, int]:
    return {name: store.dataset(name).version for name in tables}
