"""The commands `snapshot create`, `list`, `diff`, `drop` and `restore`."""

from dataclasses import asdict
from typing import Annotated

import typer

from ...store.snapshots import current
from ...store.snapshots import drop as give_up
from .app import PROOF, ForceOption, JsonOption, StoreOption, app, argument, open_store, option
from .tables import counted, print_heading, print_json, print_rows, render

commands = typer.Typer(help="Take, compare and restore snapshots of the store.")
app.add_typer(commands, name="snapshot", rich_help_panel=PROOF, no_args_is_help=True)

NameArgument = Annotated[str, argument("Name of the snapshot.")]


@commands.command()
def create(
    name: Annotated[str, argument("Name of the new snapshot; names are unique.")],
    store: StoreOption = None,
    note: Annotated[str | None, option("Record why the snapshot exists.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Take a snapshot; `rlake sql --at NAME` queries the store as it is now."""
    lake = open_store(store)
    lake.snapshot(name, note=note)
    record = {"snapshot": name, "tables": lake.at(name).versions(), "store": lake.uri}
    render(record, f"created snapshot `{name}` of {lake.uri}", as_json=as_json)


@commands.command("list")
def list_(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the snapshots."""
    found = [
        {"name": s.name, "note": s.note, "created_at": s.created_at}
        for s in current(open_store(store)).values()
    ]
    none = "no snapshots yet; take one with `rlake snapshot create NAME`"
    render({"snapshots": found}, found or none, as_json=as_json)


@commands.command()
def diff(
    first: Annotated[str, argument("Name of a snapshot, or `now`.")],
    second: Annotated[str, argument("Name of a snapshot, or `now`.")] = "now",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count the rows added to and removed from each table between two snapshots."""
    found = open_store(store).diff(first, second)
    if as_json:
        print_json({"from": first, "to": second, **asdict(found)})
        return
    if not found.tables:
        print(f"the store holds the same rows at `{first}` and `{second}`")
        return
    print_rows(
        ("table", "rows added", "rows removed", "versions"),
        [
            (d.table, d.added, d.removed, f"{d.versions[0]} to {d.versions[1]}")
            for d in found.tables
        ],
    )
    if found.experiences:
        print_heading("experiences")
        rows = [list(row.values()) for row in found.experiences]
        print_rows(("run", "source", "rows added", "rows removed"), rows)


@commands.command()
def drop(
    name: NameArgument,
    store: StoreOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a snapshot; versions that only it kept may then be removed."""
    lake = open_store(store)
    give_up(lake, name, force=force)
    text = f"deleted snapshot `{name}` of {lake.uri}"
    render({"dropped": name, "store": lake.uri}, text, as_json=as_json)


@commands.command()
def restore(
    name: NameArgument,
    store: StoreOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Restore all tables to a snapshot; the restore can be undone by another one.

    Refused while a job runs on the store.
    """
    from ..runs.job import all_killed

    lake = open_store(store)
    done = lake.restore(name, force=all_killed(lake) or force)
    if as_json:
        print_json({**asdict(done), "store": lake.uri})
        return
    if not done.tables:
        print(f"nothing to restore: the tables are unchanged since `{name}`")
        return
    changed = ", ".join(f"`{t}` to version {v}" for t, v in done.tables.items())
    print(f"restored {counted(len(done.tables), 'table')} to `{name}`: {changed}")
    print(f"undo it with `rlake snapshot restore {done.undo}`")
