"""Which rows of its source a pipeline has not treated yet, as its last row in `lineage` tells."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl

from ..operators import Operator
from ..store import Store, side_columns
from ..store.ids import content_id
from ..store.query import literal, tables_of
from ..store.schema import TABLES
from ..store.withdrawals import taken_back
from . import source as sources
from .plan import Plan
from .sink import takes_values
from .source import TAKEN_BACK, File, Source, Sql, Table, tables_read
from .spec import PipelineSpec

_CREATED = "_row_created_at_version"


@dataclass(frozen=True)
class NewRows:
    """The rows of a source that a run has to read."""

    addresses: pl.Series | None
    """Row addresses (`_rowid`) of the source table that are to be read; None: everything."""
    definition: str | None
    """Digest of name, source, operators and sink, by which later runs find this one.

    None for a run over the store as it was: later runs do not go on from it.
    """
    rows_before: int
    """Rows of the source that earlier runs treated, and that are not read again."""
    left: pl.Series | None = None
    """Ids of rows that something came for, and that the source's `where` does not choose now."""
    is_nothing: bool = False
    """Whether nothing came since the last run: there is nothing to do."""
    why: str = ""
    """What is read, and why it is not less, in words."""
    is_everything: bool = False
    """Whether what earlier runs gave, and this one does not, is of rows that are read or gone."""


def unseen(
    pipeline: PipelineSpec, plan: Plan, past: Store, *, full: bool = False, is_past: bool = False
) -> NewRows:
    """Return what a run that reads `past` has to read, by the newest run with its definition.

    Of an operator that sees single rows, these are the rows that came since; of one that sees
    groups, the groups of such rows; of a source with side columns, also rows that got a new value
    there. Everything is read when the result depends on all rows: of an operator that sees all, a
    query, a file. What the pipeline itself added to its source is never its input.

    With `full`, and of the store as it was (`is_past`), everything is read.

    A run that was killed left no row in `lineage`, so the next one reads the same again.
    """
    definition = define(pipeline, plan)
    if is_past:
        return NewRows(None, None, 0, why="everything that was there then")
    if full:
        return NewRows(None, definition, 0, why="everything, as asked for", is_everything=True)
    last = _last(past, definition)
    if last is None:
        why = "everything: there was no such run yet"
    elif _stands(pipeline, last, past):
        return _nothing(definition, last, _num_rows(pipeline.source, past))
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
    """Return what came since a run, of a pipeline for which that is enough."""
    assert isinstance(pipeline.source, Table), "of other sources everything is read"
    touched = _new(pipeline, pipeline.source, plan, past, _versions(last))
    if touched is None:
        why = "everything, as values of side columns were undone"
        return NewRows(None, definition, 0, why=why, is_everything=True)
    addresses = _chosen(pipeline.source, past, touched)["_rowid"].rename("addresses")
    rows = _num_rows(pipeline.source, past)
    left = None
    if takes_values(pipeline.sink) and len(addresses) < touched.height:
        gone = touched.filter(~pl.col("_rowid").is_in(addresses.implode()))
        left = gone[TABLES[pipeline.source.table].key[0]]
    if not len(addresses) and left is None:
        return _nothing(definition, last, rows)
    groups = any(op.scope == "group" for op in plan.operators)
    message = f"{len(addresses):,} rows that came since {_when(last)}"
    message += ", with the rest of their groups" if groups else ""
    message += (
        f"; takes back the values of {len(left):,} rows that left" if left is not None else ""
    )
    return NewRows(addresses, definition, rows - len(addresses), left, why=message)


def _nothing(definition: str, last: Mapping[str, Any], rows: int) -> NewRows:
    message = f"nothing: no row came since {_when(last)}"
    none = pl.Series("addresses", [], pl.UInt64)
    return NewRows(none, definition, rows, is_nothing=True, why=message)


def _versions(last: Mapping[str, Any]) -> dict[str, int]:
    return {v["name"]: v["version"] for v in last["source_versions"]}


def define(pipeline: PipelineSpec, plan: Plan) -> str:
    """Digest what a pipeline does: its name, source, operators and sink."""
    steps = [op.fingerprint for op in plan.operators]
    return content_id(plan.name, plan.source, steps, plan.sink)


def _why_everything(
    source: Source, operators: tuple[Operator, ...], sink: Table | File | None
) -> str:
    """Say why every run reads everything; empty when new rows are enough."""
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
    """Return `lineage_id`, source, sink and definition of the runs of that name that count."""
    found: Any = store.sql(
        "SELECT lineage_id, source, sink, pipeline_digest FROM lineage WHERE pipeline = "
        f"{literal(name)} AND pipeline_digest IS NOT NULL "
        "AND lineage_id NOT IN (SELECT lineage_id FROM withdrawn)"
    )
    return found.pl()


def _last(store: Store, definition: str) -> dict[str, Any] | None:
    """Return the newest run with this definition that was not taken back."""
    gone = taken_back(store.scan("withdrawals").collect())
    not_gone = f" AND lineage_id NOT IN ({', '.join(map(literal, gone))})" if gone else ""
    found = store.dataset("lineage").to_table(
        columns=["lineage_id", "source_versions", "created_at"],
        filter=f"pipeline_digest = {literal(definition)}{not_gone}",
    )
    rows = found.sort_by([("created_at", "descending"), ("lineage_id", "descending")])
    return rows.slice(0, 1).to_pylist()[0] if rows.num_rows else None


def _stands(pipeline: PipelineSpec, last: Mapping[str, Any], store: Store) -> bool:
    """Tell whether a run would read what the last one read, and find its result in place."""
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
    """Tell whether rows of the source were taken back, or put back, since a run."""
    if not isinstance(source, Table) or not sources.are_taken_back(source, store):
        return False
    before = dict.fromkeys(TAKEN_BACK, 1) | _versions(last)
    came = {name: f"{_CREATED} > {before[name]}" for name in TAKEN_BACK}
    of_table = f"table_name = {literal(source.table)}"
    members = store.dataset("members")
    if members.count_rows(filter=f"{of_table} AND {came['members']}"):
        return True
    said = store.dataset("withdrawals").to_table(["lineage_id"], filter=came["withdrawals"])
    named = ", ".join(map(literal, sorted({*said.column(0).to_pylist()}))) or "NULL"
    whose = f"lineage_id IN ({named})"
    own = store.dataset(source.table).count_rows(filter=whose)
    return bool(own or members.count_rows(filter=f"{of_table} AND {whose}"))


def _is_older(file: Path, when: datetime) -> bool:
    """Tell whether a file was last written before a time; one elsewhere cannot be asked."""
    try:
        return file.stat().st_mtime < when.timestamp()
    except OSError:
        return False


def _new(
    pipeline: PipelineSpec, source: Table, plan: Plan, store: Store, before: Mapping[str, int]
) -> pl.DataFrame | None:
    """Return the rows that came, or whose group or side columns got something new, chosen or not.

    None when everything has to be read, since what counted before does not count any more.
    """
    rows = _light(pipeline, source, plan, store)
    is_new = pl.col(_CREATED) > before[source.table]
    for column in source.side:
        ids = _with_new_values(column, store, before)
        if ids is None:
            return None
        is_new |= pl.col("experience_id").is_in(ids.implode())
    new = rows.filter(is_new)
    new = _without(_made(pipeline, plan), new)
    if any(op.scope == "group" for op in plan.operators):
        groups = new["group_id"].unique()
        new = rows.filter(pl.col("group_id").is_in(groups.implode(), nulls_equal=True))
        new = _without(_made(pipeline, plan), new)
    return new


def _light(pipeline: PipelineSpec, source: Table, plan: Plan, store: Store) -> pl.DataFrame:
    """Read the address of every row, the version that it came with, and what chooses it."""
    names = (
        {*TABLES[source.table].key}
        if source.side
        or source.where
        or _made(pipeline, plan)
        or sources.are_taken_back(source, store)
        else set()
    )
    names |= {"group_id"} if any(op.scope == "group" for op in plan.operators) else set()
    columns = [*sorted(names), _CREATED]
    found = store.dataset(source.table).to_table(columns=columns, with_row_id=True)
    return pl.DataFrame(pl.from_arrow(found))


def _with_new_values(
    column: side_columns.SideColumn, store: Store, before: Mapping[str, int]
) -> pl.Series | None:
    """Return the experiences about which a side table got rows; None when it lost some."""
    if column.table == "experience_values" and _superseded(store, before.get("job_events")):
        return None
    names = sorted({*column.reads} - {"created_at"})
    since = before.get(column.table, 0)
    found = store.dataset(column.table).to_table(columns=names, filter=f"{_CREATED} > {since}")
    rows = pl.DataFrame(pl.from_arrow(found))
    return rows.filter(column.chosen)["experience_id"].unique()


def _superseded(store: Store, since: int | None) -> bool:
    """Tell whether a trainer was resumed: values that it derived before may not count any more."""
    if since is None:
        return True
    wanted = f"{_CREATED} > {since} AND job = 'train' AND attempt > 1"
    return store.dataset("job_events").count_rows(filter=wanted) > 0


def _chosen(source: Table, store: Store, rows: pl.DataFrame) -> pl.DataFrame:
    """Keep the rows that count, and for which the source's `where` holds."""
    is_asked = source.where or sources.are_taken_back(source, store)
    if not is_asked or not rows.height:
        return rows
    key = TABLES[source.table].key
    names = ", ".join(f'"{n}"' for n in key)
    found = sources.rows_of(
        store.sql(f"SELECT {names} FROM {source.rows} WHERE ({source.where or 'true'}\n)")
    )
    return rows.join(found, on=key, how="semi", maintain_order="left", nulls_equal=True)


def _num_rows(source: Source, store: Store) -> int:
    """Return how many rows a source has; 0 for one that would have to be read for it."""
    if not isinstance(source, Table):
        return 0
    if not source.where and not sources.are_taken_back(source, store):
        return store.count(source.table)
    query = f"SELECT count(*) FROM {source.rows} WHERE ({source.where or 'true'}\n)"
    return store.sql(query).fetchall()[0][0]


def _without_own(pipeline: PipelineSpec, plan: Plan, store: Store) -> pl.Series | None:
    """Return the addresses of all rows but those that the pipeline made; None when it made none."""
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
    """Leave out rows that runs of this pipeline added, by whatever definition."""
    runs = runs_before(store, pipeline.name)["lineage_id"].implode()
    own = store.scan(source.table).filter(pl.col("lineage_id").is_in(runs))
    key = TABLES[source.table].key
    return rows.join(own.select(key).collect(), on=key, how="anti", maintain_order="left")


def _adds_to_source(pipeline: PipelineSpec) -> bool:
    source, sink = pipeline.source, pipeline.sink
    return isinstance(source, Table) and isinstance(sink, Table) and source.table == sink.table


def _made(pipeline: PipelineSpec, plan: Plan) -> list[str]:
    """Return what stands in the ids of rows that it added to its source, behind the parent's."""
    if not _adds_to_source(pipeline):
        return []
    return [f"/{op.name}-{op.fingerprint[:8]}" for op in plan.operators if op.kind == "augment"]


def _without(made: list[str], rows: pl.DataFrame) -> pl.DataFrame:
    if not made:
        return rows
    key = "experience_id" if "experience_id" in rows.columns else "task_id"
    return rows.filter(~pl.col(key).str.contains_any(made))


def _when(last: Mapping[str, Any]) -> str:
    return f"{last['created_at']:%Y-%m-%d %H:%M:%S}"
