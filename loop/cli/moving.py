"""Commands that move rows between files and the store: import, export."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .app import ROWS, JsonOption, StoreOption, app, open_store
from .printing import counted, print_json, screen

if TYPE_CHECKING:
    from ...store import Store


@app.command("import", rich_help_panel=ROWS)
def import_(
    table: Annotated[
        Literal["tasks", "experiences", "preferences"], typer.Argument(help="What the rows are.")
    ],
    file: Annotated[Path, typer.Argument(help="A JSONL, JSON, CSV or Parquet file.")],
    store: StoreOption = None,
    sql: Annotated[
        str | None,
        typer.Option(
            metavar="SELECT",
            help="Map the columns of the table `input` to ours; may join the store's tables. "
            '"SELECT question AS prompt_text, answer FROM input".',
        ),
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="jsonl, json, csv, parquet; or gsm8k, chat: a ready SELECT.")
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out, and count, lines that do not parse.")
    ] = False,
    taskset: Annotated[
        str | None, typer.Option(help="The tasks' set, else the file's name.", show_default=False)
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="The tasks' split, else train.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Import rows of a file: all of them or, when one is wrong, none.

    Columns are named like ours (see `rlake tables tasks`); ids, messages, groups and the tasks of
    experiences are filled in. A second import of the same file adds nothing.
    """
    from ...store.errors import ConfigError
    from ...store.files import check_select, import_rows, open_input

    if table == "preferences" and (taskset or split):
        raise ConfigError("`--taskset` and `--split` are for tasks; preferences have none")
    with (
        screen(stderr=True).status(f"importing {file}"),
        open_input(file, format=format, skip_bad=skip_bad) as source,
    ):
        lake = _open_or_make(store, lambda: check_select(table, source, sql=sql))
        done = import_rows(lake, table, source, sql=sql, taskset=taskset, split=split or "train")
    if as_json:
        print_json(vars(done) | {"file": str(file), "store": lake.uri})
        return
    with_tasks = f", and {counted(done.tasks, 'task')} that they tried" if done.tasks else ""
    print(f"imported {counted(done.rows, table[:-1])}{with_tasks} from {file} into {lake.uri}")
    if done.already:
        print(f"there already: {counted(done.already, 'row')}")
    if done.skipped:
        print(f"left out for not parsing: {counted(done.skipped, 'line')}")


def _open_or_make(place: str, check: Callable[[], None]) -> "Store":
    """Open the store; make it only when the import into it passes a check."""
    from ...store.errors import NotAStoreError

    try:
        return open_store(place)
    except NotAStoreError:
        check()
    return open_store(place, create=True)


@app.command(rich_help_panel=ROWS)
def export(
    what: Annotated[
        Literal["sft", "dpo", "experiences"],
        typer.Argument(help="Conversations, pairs, or whole rows."),
    ],
    out: Annotated[Path, typer.Option(help="The file: .jsonl, for experiences also .parquet.")],
    store: StoreOption = None,
    where: Annotated[
        str | None,
        typer.Option(
            help='Which rows, in SQL: "reward >= 1"; of preferences for dpo, else of experiences.'
        ),
    ] = None,
    sql: Annotated[
        str | None,
        typer.Option(
            metavar="SELECT",
            help="Rows of your own: sft takes `messages` or `prompt_text` and `response_text`, "
            "dpo `chosen_id` and `rejected_id`.",
        ),
    ] = None,
    at: Annotated[str | None, typer.Option(help="A snapshot's name: the store as it was.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Export rows to a file, whole or not at all.

    sft: lines of {"prompt": [...], "completion": [...]}. dpo: {"prompt", "chosen", "rejected"},
    from the table `preferences`. Both as TRL loads them. experiences: all columns.
    """
    from ...store import files

    lake = open_store(store)
    lake = lake.at(at) if at else lake
    write = {
        "sft": files.export_sft,
        "dpo": files.export_dpo,
        "experiences": files.export_experiences,
    }
    with screen(stderr=True).status(f"writing {out}"):
        done = write[what](lake, out, where=where, sql=sql)
    if as_json:
        print_json({"what": what, "rows": done.rows, "left_out": done.left_out, "out": str(out)})
        return
    print(f"wrote {counted(done.rows, 'row')} to {out}")
    if done.left_out:
        print(f"left out for having no text, or no difference: {counted(done.left_out, 'row')}")
