"""Commands of time: snapshot create, list, diff, drop, restore."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .app import PROOF, ForceOption, JsonOption, StoreOption, app, open_store
from .tables import counted, print_heading, print_json, print_rows

if TYPE_CHECKING:
    from ...store import Store

commands = typer.Typer(help="Name the store as it is, compare such moments, and go back to one.")
app.add_typer(commands, name="snapshot", rich_help_panel=PROOF, no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="The snapshot's name.")]


@commands.command()
def create(
    name: Annotated[str, typer.Argument(help="The name; given once.")],
    store: StoreOption = None,
    note: Annotated[str | None, typer.Option(help="Why it is taken.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Name the store as it is now; `rlake sql --at NAME` sees it so later."""
    lake = open_store(store)
    lake.snapshot(name, note=note)
    if as_json:
        print_json({"snapshot": name, "tables": lake.at(name).versions(), "store": lake.uri})
    else:
        print(f"snapshot `{name}` of {lake.uri}")


@commands.command("list")
def list_(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the snapshots."""
    from ...store.snapshots import current

    found = [
        {"name": s.name, "note": s.note, "created_at": s.created_at}
        for s in current(open_store(store)).values()
    ]
    if as_json:
        print_json({"snapshots": found})
    elif not found:
        print("no snapshots yet; take one with `rlake snapshot create NAME`")
    else:
        print_rows(list(found[0]), [list(row.values()) for row in found])


@commands.command()
def diff(
    first: Annotated[str, typer.Argument(help="A snapshot's name, or `now`.")],
    second: Annotated[str, typer.Argument(help="A snapshot's name, or `now`.")] = "now",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what came to each table, and what went, from one moment to another."""
    from ...store.diff import diff as compare

    found = compare(open_store(store), first, second)
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
    """Give a name up; what only it kept may be cleaned up from then on."""
    from ...store.snapshots import drop as give_up

    lake = open_store(store)
    give_up(lake, name, force=force)
    if as_json:
        print_json({"dropped": name, "store": lake.uri})
    else:
        print(f"dropped snapshot `{name}` of {lake.uri}")


@commands.command()
def restore(
    name: NameArgument,
    store: StoreOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make all tables as they were at a snapshot; history stays, and a snapshot undoes it.

    Refused while a job runs on the store.
    """
    from ...store.snapshots import restore as go_back

    lake = open_store(store)
    done = go_back(lake, name, force=_check_jobs(lake) or force)
    if as_json:
        print_json({**asdict(done), "store": lake.uri})
        return
    if not done.tables:
        print(f"nothing to restore: the tables are as they were at `{name}`")
        return
    changed = ", ".join(f"`{t}` to version {v}" for t, v in done.tables.items())
    print(f"restored {counted(len(done.tables), 'table')} to `{name}`: {changed}")
    print(f"undo it with `rlake snapshot restore {done.undo}`")


def _check_jobs(lake: "Store") -> bool:
    """Tell whether all jobs that count as running were killed; JobError for one that lives."""
    from ...store.errors import JobError
    from ...store.job_status import unfinished
    from ..runs.job import is_live

    live = {(run, job): is_live(lake, run, job) for run, job in unfinished(lake, running=True)}
    for (run, job), lives in live.items():
        if lives:
            raise JobError(f"`{job}` of run `{run}` is running in another process; stop it first")
    return all(lives is False for lives in live.values())
