"""The commands `sql` and `tables`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from ...store import interrupts
from ...store.errors import ConfigError
from ...store.query import views_sql
from .app import ROWS, AtOption, JsonOption, StoreOption, app, argument, open_store, option
from .console import Console, is_blank
from .stored_tables import print_columns, print_tables


@app.command(rich_help_panel=ROWS)
def sql(
    query: Annotated[
        str | None,
        argument(
            'Run this query, such as "SELECT * FROM groups"; `-` reads it from standard input.',
            default="a console, in a terminal",
        ),
    ] = None,
    store: StoreOption = None,
    at: AtOption = None,
    file: Annotated[Path | None, option("Run the statements of this file.", "--file", "-f")] = None,
    kind: Annotated[
        Literal["json", "jsonl", "csv", "parquet", "markdown", "line"] | None,
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
        option("Cancel a query after this long, and exit with 1.", min=0.001, metavar="SECONDS"),
    ] = None,
) -> None:
    """Query the store in SQL, over all tables and views, read-only.

    Without a query, in a terminal, it is a console: `.help` lists its commands.
    """
    if print_views:
        print(views_sql(), end="")
        return
    script = _script(query, file)
    console = Console(
        open_store(store, at=None),
        mode="json" if as_json else kind or "table",
        rows=rows,
        timeout=timeout,
        allow_files=allow_files,
    )
    if at is not None:
        console.do_at(at)
    if script is None:
        from .terminal import Terminal

        Terminal(console).run()
        return
    if is_blank(script):
        raise ConfigError("no query; give it as an argument, with `-f FILE` or as standard input")
    # threads of DuckDB and Lance produce the rows: an exception would free what they read
    with interrupts.at_once():
        console.run(script)


def _script(query: str | None, file: Path | None) -> str | None:
    """Return the statements to run, or None for those that a person will type."""
    if query is not None and file is not None:
        raise ConfigError("give the query as an argument (`-`: standard input) or `-f`, got both")
    if file is not None:
        from ...store.files.yaml_text import read_text

        return read_text(file)
    if query is not None and query != "-":
        return query
    return None if query is None and sys.stdin.isatty() else sys.stdin.read()


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
        print_tables(lake, as_json=as_json)
    else:
        print_columns(lake, name, as_json=as_json)
