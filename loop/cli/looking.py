"""Commands that look at the store: sql, tables."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import ROWS, AtOption, JsonOption, StoreOption, app, open_store
from .printing import counted, print_heading, print_json, print_rows, screen

if TYPE_CHECKING:
    import duckdb

    from ...store import Store

VIEWS = {
    "groups": "a group: mean, spread and pass rate of its rewards",
    "steps": "an optimizer step: what it was trained on",
    "backlog": "a run: how many of its rows are fresh, stale, undrawn",
    "draws_current": "a draw that counts: superseded attempts left out",
    "metrics_current": "a metric that counts, likewise",
    "policies_current": "a set of weights that counts, likewise",
    "runs_current": "a job: where it stands",
    "scores_current": "a scorer's newest verdict on an experience",
    "feedback_current": "an annotator's newest label of an experience",
    "derived_current": "the newest value of a derived column of an experience",
    "task_rates": "what a run came to with a task",
    "task_values_current": "the newest value of a name of a task",
    "labels": "the label that a person gives an item of a labelling queue",
    "agreement": "a labelling queue: how far its people agree",
    "agreement_of_two": "two people of a queue: Cohen's kappa",
    "adjudicated": "an item: what most people say of it",
}
"""Views that people ask for, and what a row is."""

_BATCH = 1024


@app.command(rich_help_panel=ROWS)
def sql(
    query: Annotated[str, typer.Argument(help='One SELECT, such as "SELECT * FROM groups".')],
    store: StoreOption = None,
    at: AtOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all rows as a JSON list of objects.")
    ] = False,
    rows: Annotated[int, typer.Option(min=1, help="How many rows to show at most.")] = 50,
) -> None:
    """Ask the store a question in SQL, over all tables and views; it can only read."""
    lake = open_store(store, at=at)
    relation = lake.sql(query)
    if as_json:
        _print_list(_records(relation))
        return
    columns = relation.columns
    found = list(itertools.islice(_rows(relation), rows + 1))
    if columns == ["explain_key", "explain_value"]:
        print(*(value for _, value in found), sep="\n")
        return
    print_rows(columns, found[:rows])
    note = counted(len(found), "row")
    if len(found) > rows:
        note = f"first {counted(rows, 'row')}; see more with `--rows N`, all with `--json`"
    screen().print(f"({note})", style="dim")


def _records(relation: "duckdb.DuckDBPyRelation") -> Iterator[dict[str, Any]]:
    for batch in relation.to_arrow_reader(_BATCH):
        yield from batch.to_pylist(maps_as_pydicts="lossy")


def _rows(relation: "duckdb.DuckDBPyRelation") -> Iterator[tuple[Any, ...]]:
    """Yield rows by place, since two columns may have one name."""
    for batch in relation.to_arrow_reader(_BATCH):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _print_list(records: Iterator[dict[str, Any]]) -> None:
    """Print a JSON list, a row a line, without holding it in memory."""
    from ...store.files.lines import json_line

    before = "["
    for record in records:
        print(before, json_line(record), sep="\n" if before == "[" else "", end="")
        before = ",\n"
    print("[]" if before == "[" else "\n]")


@app.command(rich_help_panel=ROWS)
def tables(
    name: Annotated[
        str | None, typer.Argument(help="A table or view: print its columns.", show_default=False)
    ] = None,
    store: StoreOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the tables and how many rows they have, or the columns of one and what they mean."""
    lake = open_store(store, at=at)
    if name is None:
        _print_tables(lake, as_json)
    else:
        _print_columns(lake, name, as_json)


def _print_tables(lake: "Store", as_json: bool) -> None:
    from ...store.schema import TABLES

    versions = lake.versions()
    listed = [(t.name, lake.count(t.name), versions[t.name], t.row) for t in TABLES.values()]
    columns = ("table", "rows", "version", "a row is")
    if as_json:
        print_json({"tables": [dict(zip(columns, row, strict=True)) for row in listed]})
        return
    print_rows(columns, listed)
    screen().print()
    print_rows(("view", "a row is"), list(VIEWS.items()))


def _print_columns(lake: "Store", name: str, as_json: bool) -> None:
    from ...store.errors import NotFoundError, nearest
    from ...store.schema import TABLES

    if name not in TABLES and name not in VIEWS:
        raise NotFoundError(f"there is no table or view `{name}`{nearest(name, [*TABLES, *VIEWS])}")
    if name in TABLES:
        header, row = ("column", "type", "must be there", "meaning"), TABLES[name].row
        listed = [
            (c.name, str(c.type), "yes" if c.required else "", c.note) for c in TABLES[name].columns
        ]
    else:
        header, row = ("column", "type"), VIEWS[name]
        view = lake.sql(f"SELECT * FROM {name}")
        listed = [(c, str(t).lower()) for c, t in zip(view.columns, view.types, strict=True)]
    if as_json:
        found = [dict(zip(header, values, strict=True)) for values in listed]
        print_json({"table": name, "row": row, "columns": found})
        return
    print_heading(f"{name}: {row}")
    print_rows(header, listed)
