"""The commands `branch create`, `list`, `merge` and `drop`."""

from typing import Annotated

import typer

from ...store import Store
from ...store.branches import Branch, current, find, rows_added
from ...store.errors import StoreError
from ...store.merge_branch import left_behind
from .app import PROOF, AtOption, ForceOption, JsonOption, StoreOption, app, argument, open_store
from .tables import counted, print_json, print_rows, render

commands = typer.Typer(help="Branch the store, and merge derived results back.")
app.add_typer(commands, name="branch", rich_help_panel=PROOF, no_args_is_help=True)

NameArgument = Annotated[str, argument("Name of the branch.")]


@commands.command()
def create(
    name: NameArgument, store: StoreOption = None, at: AtOption = None, as_json: JsonOption = False
) -> None:
    """Create a branch of the store as it is, or as it was at a snapshot."""
    lake = open_store(store)
    branch = lake.branch(name, at=at)
    record = {"branch": name, "store": branch.uri, "tables": branch.versions()}
    text = f"created branch `{name}` of {lake.uri}; use it with `--store {branch.uri}`"
    render(record, text, as_json=as_json)


@commands.command("list")
def list_(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the branches, and how many rows each has added."""
    lake = open_store(store)
    found = [
        {
            "name": b.name,
            "parent": b.parent,
            "created_at": b.created_at,
            "rows_added": _rows_added(lake, b),
        }
        for b in current(lake).values()
    ]
    none = "no branches; create one with `rlake branch create NAME`"
    render({"branches": found}, [_shown(row) for row in found] or none, as_json=as_json)


def _rows_added(lake: "Store", branch: "Branch") -> dict[str, int] | None:
    """Return how many rows a branch added to each table; None when it is damaged."""
    try:
        return {table: n for table, n in rows_added(lake, branch).items() if n}
    except StoreError:
        return None


def _shown(row: dict[str, object]) -> dict[str, object]:
    added = row["rows_added"]
    words = "cannot be read; see `rlake doctor`"
    if isinstance(added, dict):
        words = ", ".join(f"{table} {n:+,}" for table, n in added.items()) or "none"
    return {**row, "parent": row["parent"] or "the store itself", "rows_added": words}


@commands.command()
def merge(name: NameArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Append a branch's derived results to the store: scores, labels, values, pairs.

    Results about the branch's own experiences stay there. Rows that conflict with the store's are
    skipped and counted, by table and reason. Merging again adds nothing.
    """
    lake = open_store(store)
    merged = lake.merge_branch(name)
    done = {table: vars(one) for table, one in merged.items()}
    left = left_behind(lake, name, merged)
    if as_json:
        print_json({"branch": name, "store": lake.uri, "tables": done, "left_behind": left})
        return
    print_rows(
        ("table", "merged", "there already", "of other experiences", "conflicts"),
        [(table, *list(counts.values())[:4]) for table, counts in done.items()],
    )
    for table, reasons in left.items():
        for why, rows in reasons.items():
            print(f"left on the branch: {counted(rows, 'row')} of {table} ({why})")
    for table, counts in done.items():
        for key in counts["conflicts"]:
            print(f"conflict in {table}: {key}")


@commands.command()
def drop(
    name: NameArgument,
    store: StoreOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a branch with its rows, and its runs' checkpoints and weights."""
    lake = open_store(store)
    added = _rows_added(lake, find(lake, name))
    lost = None if added is None else sum(n for n in added.values() if n > 0)
    lake.drop_branch(name, force=force)
    rows = "what was left" if lost is None else counted(lost, "row")
    text = f"deleted branch `{name}` of {lake.uri}, with {rows} of its own"
    render({"dropped": name, "rows": lost, "store": lake.uri}, text, as_json=as_json)
