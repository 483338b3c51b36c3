"""Commands of branches: branch create, list, merge, drop."""

from typing import TYPE_CHECKING, Annotated

import typer

from .app import PROOF, AtOption, ForceOption, JsonOption, StoreOption, app, open_store
from .tables import counted, print_json, print_rows

if TYPE_CHECKING:
    from ...store import Store
    from ...store.branches import Branch

commands = typer.Typer(help="Let the store go two ways, and bring back what was found out.")
app.add_typer(commands, name="branch", rich_help_panel=PROOF, no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="The branch's name.")]


@commands.command()
def create(
    name: NameArgument,
    store: StoreOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a branch leave from the store as it is, or as it was at a snapshot."""
    lake = open_store(store)
    branch = lake.branch(name, at=at)
    if as_json:
        print_json({"branch": name, "store": branch.uri, "tables": branch.versions()})
    else:
        print(f"branch `{name}` of {lake.uri}; use it with `--store {branch.uri}`")


@commands.command("list")
def list_(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the branches, and by how many rows their tables grew."""
    from ...store.branches import current

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
    if as_json:
        print_json({"branches": found})
    elif not found:
        print("no branches; make one with `rlake branch create NAME`")
    else:
        print_rows(list(found[0]), [_shown(row) for row in found])


def _rows_added(lake: "Store", branch: "Branch") -> dict[str, int] | None:
    """Return by how many rows tables of a branch grew; None when it is damaged."""
    from ...store.branches import rows_added
    from ...store.errors import StoreError

    try:
        return {table: n for table, n in rows_added(lake, branch).items() if n}
    except StoreError:
        return None


def _shown(row: dict[str, object]) -> list[object]:
    """Return a row as it is printed: the main line has no name, and rows come with their table."""
    added = row["rows_added"]
    words = "it cannot be read: see `rlake doctor`"
    if isinstance(added, dict):
        words = ", ".join(f"{table} {n:+,}" for table, n in added.items()) or "none"
    return [row["name"], row["parent"] or "the store itself", row["created_at"], words]


@commands.command()
def merge(name: NameArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Append to the store what a branch found out: scores, labels, derived values, pairs.

    What the branch knows of its own experiences stays there, and rows with other content than the
    store's are left out: how many, of which tables and why, is said. To do it again adds nothing.
    """
    from ...store.merge_branch import left_behind
    from ...store.merge_branch import merge as bring_back

    lake = open_store(store)
    merged = bring_back(lake, name)
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
    """Remove a branch with its rows, its runs' checkpoints and its weights."""
    from ...store.branches import drop as remove
    from ...store.branches import find

    lake = open_store(store)
    added = _rows_added(lake, find(lake, name))
    lost = None if added is None else sum(n for n in added.values() if n > 0)
    remove(lake, name, force=force)
    if as_json:
        print_json({"dropped": name, "rows": lost, "store": lake.uri})
    else:
        rows = "what was left" if lost is None else counted(lost, "row")
        print(f"dropped branch `{name}` of {lake.uri}, with {rows} of its own")
