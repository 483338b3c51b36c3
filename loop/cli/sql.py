"""The commands `sql` and `tables`."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ...store import Store, interrupts
from ...store.errors import ConfigError, NotFoundError, nearest
from ...store.query import views_sql
from ...store.schema import TABLES
from .app import ROWS, AtOption, JsonOption, StoreOption, app, argument, open_store, option
from .output_formats import BATCH_ROWS, write_rows
from .tables import counted, print_heading, print_json, print_rows, screen

if TYPE_CHECKING:
    import duckdb


VIEWS = {
    "groups": "a group: mean, spread and pass rate of its rewards",
    "steps": "an optimizer step: what it was trained on",
    "backlog": "a run: how many of its rows are fresh, stale, undrawn",
    "draws_current": "a draw that counts: superseded attempts left out",
    "metrics_current": "a metric that counts, likewise",
    "policies_current": "a set of weights that counts, likewise",
    "runs": "a job: its status",
    "tasks_current": "a task that counts: those removed by `rlake undo` left out",
    "experiences_current": "an experience that counts, likewise",
    "preferences_current": "a pair that counts, likewise, both of its experiences too",
    "withdrawn": "an import or pipeline run that was undone, and what replaced it",
    "makers": "a row, and an import or pipeline run that gave it",
    "scores_current": "a scorer's newest verdict on an experience",
    "feedback_current": "an annotator's newest label of an experience",
    "experience_values_current": "the newest value of a derived column of an experience",
    "turns": "a message of a conversation",
    "tool_calls": "a call of a tool, with its result",
    "task_pass_rates": "how a run did on a task",
    "task_values_current": "the newest value of a name of a task",
    "labels": "the label that a person gives an item of a labeling queue",
    "agreement": "a labeling queue: how far its annotators agree",
    "pairwise_agreement": "two people of a queue: Cohen's kappa",
    "adjudicated": "an item: its majority label",
}
"""Public views, and what a row is."""

MACROS = {
    "pass_at_k(n, c, k)": "pass@k: chance that one of k of n rollouts is correct, if c of n are",
    "pass_hat_k(n, c, k)": "pass^k: chance that all of k of n rollouts are correct, if c of n are",
}
"""Public macros, and what they return."""


@app.command(rich_help_panel=ROWS)
def sql(
    query: Annotated[
        str | None,
        argument(
            'Run this query, such as "SELECT * FROM groups"; `-` reads it from standard input.',
            default=False,
        ),
    ] = None,
    store: StoreOption = None,
    at: AtOption = None,
    file: Annotated[Path | None, option("Read the query from a file.", "--file", "-f")] = None,
    kind: Annotated[
        Literal["json", "jsonl", "csv", "parquet"] | None,
        option("Print all rows, in this format.", "--format"),
    ] = None,
    as_json: Annotated[
        bool, option("Print all rows as a JSON list: `--format json`.", "--json")
    ] = False,
    allow_files: Annotated[
        bool, option("Allow the query to read files, such as 'x.parquet'.", "--allow-files")
    ] = False,
    print_views: Annotated[
        bool, option("Print the views as SQL for other programs.", "--print-views")
    ] = False,
    rows: Annotated[int, option("Show at most this many rows.", min=1)] = 50,
    timeout: Annotated[
        float | None,
        option("Cancel the query after this long, and exit with 1.", min=0.001, metavar="SECONDS"),
    ] = None,
) -> None:
    """Query the store in SQL, over all tables and views, read-only."""
    if print_views:
        print(views_sql(), end="")
        return
    asked = _query(query, file)
    lake = open_store(store, at=at)
    # threads of DuckDB and Lance produce the rows: an exception would free what they read
    with interrupts.at_once():
        relation = lake.sql(asked, allow_files=allow_files, timeout=timeout)
        if as_json or kind:
            write_rows(relation, sys.stdout.buffer, kind or "json")
        else:
            _print_table(relation, rows)


def _query(query: str | None, file: Path | None) -> str:
    if (query is None) == (file is None):
        got = "both" if file else "neither"
        raise ConfigError(f"give the query as an argument (`-`: standard input) or `-f`, got {got}")
    if file is not None:
        from ...store.files.yaml_text import read_text

        return read_text(file)
    return sys.stdin.read() if query == "-" else str(query)


def _print_table(relation: "duckdb.DuckDBPyRelation", rows: int) -> None:
    columns = relation.columns
    # One more than shown tells whether there are more, without counting them all.
    found = list(itertools.islice(_rows(relation), rows + 1))
    # The plan is a drawing, which the cells of a table would break.
    if columns == ["explain_key", "explain_value"]:
        print(*(value for _, value in found), sep="\n")
        return
    print_rows(columns, found[:rows])
    note = counted(len(found), "row")
    if len(found) > rows:
        note = f"first {counted(rows, 'row')}; see more with `--rows N`, all with `--format`"
    screen().print(f"({note})", style="dim")


def _rows(relation: "duckdb.DuckDBPyRelation") -> Iterator[tuple[Any, ...]]:
    """Yield rows as tuples, since two columns may have one name."""
    for batch in relation.to_arrow_reader(BATCH_ROWS):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


@app.command(rich_help_panel=ROWS)
def tables(
    name: Annotated[
        str | None, argument("Describe the columns of this table or view.", default="list all")
    ] = None,
    store: StoreOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the tables with their row counts, or describe the columns of one."""
    lake = open_store(store, at=at)
    if name is None:
        _print_tables(lake, as_json)
    else:
        _print_columns(lake, name, as_json)


def _print_tables(lake: "Store", as_json: bool) -> None:
    versions = lake.versions()
    listed = [(t.name, lake.count(t.name), versions[t.name], t.row) for t in TABLES.values()]
    for name, version in lake.user_versions().items():
        [(rows,)] = lake.sql(f'SELECT count(*) FROM "{name}"').fetchall()
        listed.append((name, rows, version, "a row of your own table"))
    columns = ("table", "rows", "version", "a row is")
    if as_json:
        print_json({"tables": [dict(zip(columns, row, strict=True)) for row in listed]})
        return
    print_rows(columns, listed)
    screen().print()
    print_rows(("view", "a row is"), list(VIEWS.items()))
    screen().print()
    print_rows(("macro", "returns"), list(MACROS.items()))


def _print_columns(lake: "Store", name: str, as_json: bool) -> None:
    # Only known names reach the query below, and so need no quotes.
    if name not in TABLES and name not in VIEWS:
        raise NotFoundError(
            f"table or view `{name}` does not exist{nearest(name, [*TABLES, *VIEWS])}"
        )
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
