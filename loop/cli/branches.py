"""Commands of branches: branch create, list, merge, drop."""

from typing import Annotated

import typer

from .app import PROOF, AtOption, ForceOption, JsonOption, StoreOption, app, open_store
from .printing import counted, print_json, print_rows

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
    from ...store.branches import current, rows_added

    lake = open_store(store)
    found = [
        {
            "name": b.name,
            "parent": b.parent,
            "created_at": b.created_at,
            "rows_added": {t: n for t, n in rows_added(lake, b).items() if n},
        }
        for b in current(lake).values()
    ]
    if as_json:
        print_json({"branches": found})
    elif not found:
        print("no branches; make one with `rlake branch create NAME`")
    else:
        print_rows(list(found[0]), [_shown(row) for row in found])


def _shown(row: dict[str, object]) -> list[object]:
    """Return a row as it is printed: the main line has no name, and rows come with their table."""
    added = row["rows_added"]
    assert isinstance(added, dict)
    words = ", ".join(f"{table} {n:+,}" for table, n in added.items()) or "none"
    return [row["name"], row["parent"] or "the store itself", row["created_at"], words]


@commands.command()
def merge(name: NameArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Append to the store what a branch found out: scores, labels, derived values, pairs.

    What the branch knows of its own experiences stays there, and rows with other content than the
    store's are left out. To do it again adds nothing.
    """
    from ...store.merging import merge as bring_back

    lake = open_store(store)
    done = {table: vars(merged) for table, merged in bring_back(lake, name).items()}
    if as_json:
        print_json({"branch": name, "store": lake.uri, "tables": done})
        return
    print_rows(
        ("table", "merged", "there already", "of other experiences", "conflicts"),
        [(table, *list(counts.values())[:4]) for table, counts in done.items()],
    )
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
    from ...store.branches import find, rows_added

    lake = open_store(store)
    lost = sum(n for n in rows_added(lake, find(lake, name)).values() if n > 0)
    remove(lake, name, force=force)
    if as_json:
        print_json({"dropped": name, "rows": lost, "store": lake.uri})
    else:
        print(f"dropped branch `{name}` of {lake.uri}, with {counted(lost, 'row')} of its own")
