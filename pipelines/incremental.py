"""Incremental runs: the rows of a source that are new since the last run, as `lineage` says."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl

from ..operators import Operator
from ..store import Store, side_columns
from ..store.changes import CREATED
from ..store.ids import content_id
from ..store.query import is_in, literal, tables_of
from ..store.schema import TABLES
from ..store.withdrawals import taken_back
from . import source as sources
from .plan import Plan
from .sink import takes_values
from .source import TAKEN_BACK, File, Source, Sql, Table, tables_read
from .spec import PipelineSpec


@dataclass(frozen=True)
class NewRows:
    """The rows of a source that a run has to read."""

    addresses: pl.Series | None
    """Row addresses (`_rowid`) of the source table to read; None: all rows."""
    definition: str | None
    """Digest of name, source, operators and sink, by which later runs find this one.

    None for a run over an earlier state of the store, which later runs do not continue.
    """
    rows_before: int
    """Rows of the source that earlier runs processed and this one skips."""
    left: pl.Series | None = None
    """Ids of rows with new data that the source's `where` no longer selects."""
    is_nothing: bool = False
    """Whether there is nothing new since the last run."""
    why: str = ""
    """What is read and why, as text."""
    is_everything: bool = False
    """Whether all rows are read, so that results of earlier runs that are missing now are stale."""


def new_rows(
    pipeline: PipelineSpec, plan: Plan, past: Store, *, full: bool = False, is_past: bool = False
) -> NewRows:
    """Return what a run over `past` must read, given the newest run with the same definition.

    These are the rows added since; if an operator needs groups, the groups of such rows; if the
    source has side columns, also rows with a new value there. Everything is read if the result
    depends on all rows: an operator needs all rows, or the source is a query or a file. Rows that
    the pipeline itself added to its source are never its input.

    With `full`, and for an earlier state of the store (`is_past`), everything is read.

    A killed run leaves no row in `lineage`, so the next one reads the same rows again.
    """
    definition = define(pipeline, plan)
    if is_past:
        return NewRows(None, None, 0, why="everything that was there then")
    if full:
        return NewRows(None, definition, 0, why="everything, as asked for", is_everything=True)
    last = _last(past, definition)
    # from the cheapest answer to the dearest: versions first, then metadata, rows at the end
    if last is None:
        why = "everything: there was no such run yet"
    elif _stands(pipeline, last, past):
        return _nothing(definition, last, num_rows(pipeline.source, past))
    elif reason := _why_everything(pipeline.source, plan.operators, pipeline.sink):
        why = f"everything, as {reason}"
    elif _other_rows_count(pipeline.source, last, past):
        why = "everything, as rows were taken back or put back since"
    else:
        return _since(pipeline, plan, past, last, definition)
    addresses = _without_own(pipeline, plan, past)
    return NewRows(addresses, definition, 0, why=why, is_everything=True)


def _since(
    pipeline: PipelineSpec, plan: Plan, past: Store, last: Mapping[str, Any], definition: str
) -> NewRows:
    """Return what is new since a run, for a pipeline for which that is enough."""
    assert isinstance(pipeline.source, Table), "of other sources everything is read"
    touched = _new(pipeline, pipeline.source, plan, past, _versions(last))
    if touched is None:
        why = "everything, as values of side columns were undone"
        return NewRows(None, definition, 0, why=why, is_everything=True)
    addresses = _chosen(pipeline.source, past, touched)["_rowid"].rename("addresses")
    rows = num_rows(pipeline.source, past)
    left = None
    if takes_values(pipeline.sink) and len(addresses) < touched.height:
        gone = touched.filter(~pl.col("_rowid").is_in(addresses.implode()))
        left = gone[TABLES[pipeline.source.table].key[0]]
    if not len(addresses) and left is None:
        return _nothing(definition, last, rows)
    groups = any(op.scope == "group" for op in plan.operators)
    why = f"{len(addresses):,} rows that came since {_when(last)}"
    why += ", with the rest of their groups" if groups else ""
    why += f"; takes back the values of {len(left):,} rows that left" if left is not None else ""
    return NewRows(addresses, definition, rows - len(addresses), left, why=why)


def _nothing(definition: str, last: Mapping[str, Any], rows: int) -> NewRows:
    why = f"nothing: no row came since {_when(last)}"
    none = pl.Series("addresses", [], pl.UInt64)
    return NewRows(none, definition, rows, is_nothing=True, why=why)


def _versions(last: Mapping[str, Any]) -> dict[str, int]:
    return {v["name"]: v["version"] for v in last["source_versions"]}


def define(pipeline: PipelineSpec, plan: Plan) -> str:
    """Return the digest of a pipeline's name, source, operators and sink."""
    steps = [op.fingerprint for op in plan.operators]
    return content_id(plan.name, plan.source, steps, plan.sink)


def _why_everything(
    source: Source, operators: tuple[Operator, ...], sink: Table | File | None
) -> str:
    """Return why every run reads everything; empty when new rows are enough."""
    if not isinstance(source, Table):
        what = "query" if isinstance(source, Sql) else "file" if isinstance(source, File) else ""
        return f"a {what} is read whole" if what else "a frame in memory is read whole"
    if sink is None:
        return "the rows are returned"
    if isinstance(sink, Table) and sink.mode == "replace":
        return "what it gave before is replaced"
    if isinstance(sink, File):
        return "a file is written whole"
    if source.where and tables_of(source.where):
        return f"`where` asks {', '.join(sorted(tables_of(source.where)))}"
    for op in operators:
        if op.scope == "all" or (
            op.scope == "group" and "group_id" not in TABLES[source.table].names
        ):
            return f"`{op.name}` sees all rows"
    return ""


def runs_before(store: Store, name: str) -> pl.DataFrame:
    """Return `lineage_id`, source, sink and digest of the runs of a name that were not undone."""
    found: Any = store.sql(
        "SELECT lineage_id, source, sink, pipeline_digest FROM lineage WHERE pipeline = "
        f"{literal(name)} AND pipeline_digest IS NOT NULL "
        "AND lineage_id NOT IN (SELECT lineage_id FROM withdrawn)"
    )
    return found.pl()


def _last(store: Store, definition: str) -> dict[str, Any] | None:
    """Return the newest run with this definition that was not undone."""
    gone = taken_back(store.scan("withdrawals").collect())
    not_gone = f" AND NOT {is_in('lineage_id', gone)}" if gone else ""
    # by the digest of the definition, not by name: a changed operator starts from the beginning
    found = store.dataset("lineage").to_table(
        columns=["lineage_id", "source_versions", "created_at"],
        filter=f"pipeline_digest = {literal(definition)}{not_gone}",
    )
    rows = found.sort_by([("created_at", "descending"), ("lineage_id", "descending")])
    return rows.slice(0, 1).to_pylist()[0] if rows.num_rows else None


def _stands(pipeline: PipelineSpec, last: Mapping[str, Any], store: Store) -> bool:
    """Return whether a run would read what the last one read, and its result still exists."""
    source, sink = pipeline.source, pipeline.sink
    if sink is None or isinstance(source, pl.LazyFrame | pl.DataFrame):
        return False
    if isinstance(sink, File) and not Path(sink.file).exists():
        return False
    if isinstance(source, File) and not _is_older(Path(source.file), last["created_at"]):
        return False
    now, before = store.versions(), _versions(last)
    is_same = all(before.get(name) == now[name] for name in tables_read(source))
    return is_same and not _other_rows_count(source, last, store)


def _other_rows_count(source: Source, last: Mapping[str, Any], store: Store) -> bool:
    """Return whether rows of the source were undone or restored since a run."""
    if not isinstance(source, Table) or not sources.are_taken_back(source, store):
        return False
    before = dict.fromkeys(TAKEN_BACK, 1) | _versions(last)
    came = {name: f"{CREATED} > {before[name]}" for name in TAKEN_BACK}
    of_table = f"table_name = {literal(source.table)}"
    members = store.dataset("members")
    if members.count_rows(filter=f"{of_table} AND {came['members']}"):
        return True
    said = store.dataset("withdrawals").to_table(["lineage_id"], filter=came["withdrawals"])
    whose = is_in("lineage_id", sorted({*said.column(0).to_pylist()}))
    own = store.dataset(source.table).count_rows(filter=whose)
    return bool(own or members.count_rows(filter=f"{of_table} AND {whose}"))


def _is_older(file: Path, when: datetime) -> bool:
    """Return whether a file was last written before a time; False for a remote file."""
    try:
        # Not `<=`: a file of the same moment may have been written after it was read.
        return file.stat().st_mtime < when.timestamp()
    except OSError:
        return False


def _new(
    pipeline: PipelineSpec, source: Table, plan: Plan, store: Store, before: Mapping[str, int]
) -> pl.DataFrame | None:
    """Return rows that are new, or whose group or side columns are, whether selected or not.

    None when everything must be read, since values that counted before no longer do.
    """
    rows = _light(pipeline, source, plan, store)
    is_new = pl.col(CREATED) > before[source.table]
    for column in source.side:
        ids = _with_new_values(column, store, before)
        if ids is None:
            return None
        # a new value of a side column is new input for an old row
        is_new |= pl.col("experience_id").is_in(ids.implode())
    new = rows.filter(is_new)
    # the pipeline's own rows are removed twice: before they make a group count as new, and again
    # after the other rows of a group were added
    new = _without(_made(pipeline, plan), new)
    if any(op.scope == "group" for op in plan.operators):
        groups = new["group_id"].unique()
        new = rows.filter(pl.col("group_id").is_in(groups.implode(), nulls_equal=True))
        new = _without(_made(pipeline, plan), new)
    return new


def _light(pipeline: PipelineSpec, source: Table, plan: Plan, store: Store) -> pl.DataFrame:
    """Read the address of every row, the version that added it, and the columns that select it."""
    # without them addresses and versions are enough, which Lance reads from metadata
    by_id = source.side or source.where or _made(pipeline, plan)
    names = {*TABLES[source.table].key} if by_id or sources.are_taken_back(source, store) else set()
    names |= {"group_id"} if any(op.scope == "group" for op in plan.operators) else set()
    columns = [*sorted(names), CREATED]
    found = store.dataset(source.table).to_table(columns=columns, with_row_id=True)
    return pl.DataFrame(pl.from_arrow(found))


def _with_new_values(
    column: side_columns.SideColumn, store: Store, before: Mapping[str, int]
) -> pl.Series | None:
    """Return the experiences with new rows in a side table; None if rows there were undone."""
    if column.table == "experience_values" and _superseded(store, before.get("job_events")):
        return None
    names = sorted({*column.reads} - {"created_at"})
    since = before.get(column.table, 0)
    found = store.dataset(column.table).to_table(columns=names, filter=f"{CREATED} > {since}")
    rows = pl.DataFrame(pl.from_arrow(found))
    return rows.filter(column.chosen)["experience_id"].unique()


def _superseded(store: Store, since: int | None) -> bool:
    """Return whether a trainer was resumed: values that it derived before may be superseded."""
    if since is None:
        return True
    wanted = f"{CREATED} > {since} AND job = 'train' AND attempt > 1"
    return store.dataset("job_events").count_rows(filter=wanted) > 0


def _chosen(source: Table, store: Store, rows: pl.DataFrame) -> pl.DataFrame:
    """Keep the rows that were not undone and that the source's `where` selects."""
    is_asked = source.where or sources.are_taken_back(source, store)
    if not is_asked or not rows.height:
        return rows
    key = TABLES[source.table].key
    names = ", ".join(f'"{n}"' for n in key)
    found = sources.rows_of(
        store.sql(f"SELECT {names} FROM {source.rows} WHERE ({source.where or 'true'}\n)")
    )
    return rows.join(found, on=key, how="semi", maintain_order="left", nulls_equal=True)


def num_rows(source: Source, store: Store) -> int:
    """Return how many rows a source has; 0 if it would have to be read to count them."""
    if not isinstance(source, Table):
        return 0
    if not source.where and not sources.are_taken_back(source, store):
        return store.count(source.table)
    query = f"SELECT count(*) FROM {source.rows} WHERE ({source.where or 'true'}\n)"
    return store.sql(query).fetchall()[0][0]


def _without_own(pipeline: PipelineSpec, plan: Plan, store: Store) -> pl.Series | None:
    """Return the addresses of all rows except the pipeline's own; None when it added none."""
    source = pipeline.source
    if not isinstance(source, Table) or not _made(pipeline, plan):
        return None
    rows = _light(pipeline, source, plan, store)
    left = _without(_made(pipeline, plan), rows)
    if isinstance(pipeline.sink, Table) and pipeline.sink.mode == "replace":
        left = _without_replaced(pipeline, source, store, left)
    return None if left.height == rows.height else _chosen(source, store, left)["_rowid"]


def _without_replaced(
    pipeline: PipelineSpec, source: Table, store: Store, rows: pl.DataFrame
) -> pl.DataFrame:
    """Leave out rows that any run of this pipeline's name added."""
    runs = runs_before(store, pipeline.name)["lineage_id"].implode()
    own = store.scan(source.table).filter(pl.col("lineage_id").is_in(runs))
    key = TABLES[source.table].key
    return rows.join(own.select(key).collect(), on=key, how="anti", maintain_order="left")


def _made(pipeline: PipelineSpec, plan: Plan) -> list[str]:
    """Return the suffixes of ids of rows that the pipeline added to its source."""
    source, sink = pipeline.source, pipeline.sink
    if not (isinstance(source, Table) and isinstance(sink, Table) and source.table == sink.table):
        return []
    return [f"/{op.name}-{op.fingerprint[:8]}" for op in plan.operators if op.kind == "augment"]


def _without(made: list[str], rows: pl.DataFrame) -> pl.DataFrame:
    if not made:
        return rows
    key = "experience_id" if "experience_id" in rows.columns else "task_id"
    return rows.filter(~pl.col(key).str.contains_any(made))


def _when(last: Mapping[str, Any]) -> str:
    return f"{last['created_at']:%Y-%m-%d %H:%M:%S}"
