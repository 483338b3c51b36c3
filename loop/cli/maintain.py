"""The commands `maintain`, `doctor` and `retention`."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from ...store.connect import look
from ...store.maintenance import GRACE_SECONDS, retention
from ...store.maintenance.report import COLUMNS
from ...store.query import literal
from .app import CARE, JsonOption, StoreOption, app, argument, heavy, listen, open_store, option
from .run import SetOption, configured
from .tables import print_json, print_rows, render, screen

_MARKS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


@app.command(rich_help_panel=CARE)
def maintain(
    store: StoreOption = None,
    dry_run: Annotated[
        bool, option("Report what would be done, and change nothing.", "--dry-run")
    ] = False,
    grace: Annotated[
        float | None,
        option(
            "Keep versions that were the newest in the last SECONDS.",
            min=0,
            metavar="SECONDS",
            default="600",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Apply retention rules, compact files, update indexes, and remove unneeded versions.

    Safe while jobs read and write. Whatever snapshots and branches need is kept.
    """
    lake = open_store(store)
    kept = GRACE_SECONDS if grace is None else grace
    with screen(stderr=True).status("maintaining"):
        report = lake.maintain(dry_run=dry_run, grace=kept)
    if as_json:
        print_json({**report.as_dict(), "store": lake.uri})
        return
    if report.busy:
        print(f"nothing done: {report.busy}")
        return
    print_rows(COLUMNS, report.rows())
    for forgotten in report.forgotten:
        print(forgotten)
    print(f"{'this would be done' if dry_run else 'done'} in {report.seconds:.2f} s")
    screen().print(
        f"(versions that were the newest in the last {kept:g} s stay, for who is reading them)",
        style="dim",
    )


@app.command(rich_help_panel=CARE)
def doctor(
    config: Annotated[
        str | None,
        argument("Estimate the memory of this YAML file or recipe instead.", default=False),
    ] = None,
    store: StoreOption = None,
    overrides: SetOption = None,
    deep: Annotated[
        bool, option("Also read every file, and compare each row with its digest.", "--deep")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a store for problems and print the fixes; exit with 1 when there are errors.

    With a configuration, estimate the memory of its run, and check that this machine has it.
    """
    if config is not None:
        _check_memory(config, overrides, as_json=as_json)
        return
    from ...operators.sandbox import protection
    from ...store.corruption import examine
    from ...store.doctor import Finding, diagnose
    from ..runs.job import is_live

    listen()
    lake = look(store)
    found = diagnose(lake, is_live=is_live)
    found += examine(lake) if deep else []
    confined = protection()
    level = "ok" if confined.startswith("namespaces") else "note"
    found.append(Finding(level, f"code under test is confined here by {confined}"))
    if as_json:
        print_json({"findings": [asdict(f) for f in found], "store": lake.uri})
    else:
        for finding in found:
            _print_finding(finding)
    if any(finding.level == "error" for finding in found):
        raise typer.Exit(1)


def _check_memory(config: str, overrides: list[str] | None, *, as_json: bool) -> None:
    found = heavy("trainer.memory").estimate(configured(config, overrides, None))
    if as_json:
        print_json({**asdict(found), "problems": found.problems})
    else:
        rows = heavy("report.plan").memory_rows(found)
        print_rows(("part", "device", "memory", "kind"), rows)
        for problem in found.problems:
            screen().print(f"error    {problem}", style=_MARKS["error"], soft_wrap=True)
    if found.problems:
        raise typer.Exit(1)


def _print_finding(finding: Any) -> None:
    from rich.text import Text

    line = Text(f"{finding.level:<8} ", style=_MARKS[finding.level])
    screen().print(line + Text(finding.what, style="none"), soft_wrap=True)
    if finding.way_out:
        screen().print(Text(f"{'':<8} -> {finding.way_out}"), soft_wrap=True)


rules = typer.Typer(help="Manage retention rules: which rows `maintain` deletes.")
app.add_typer(rules, name="retention", rich_help_panel=CARE, no_args_is_help=True)


@rules.command()
def add(
    name: Annotated[str, argument("Name of the rule.")],
    table: Annotated[
        str,
        option("Delete rows of this table: experiences, scores, experience_values or embeddings."),
    ],
    where: Annotated[
        str,
        option(
            'Delete rows that match this SQL condition: "created_at < now() - INTERVAL 90 DAY".'
        ),
    ],
    store: StoreOption = None,
    note: Annotated[str | None, option("Record why the rule exists.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Add a retention rule; preview its effect with `rlake maintain --dry-run`.

    Rows of unfinished runs are kept, and snapshots still show what is deleted later.
    """
    rule = retention.add(open_store(store), name, table=table, where=where, note=note)
    text = f"added rule `{name}`; `rlake maintain --dry-run` counts the rows that it names"
    render(asdict(rule), text, as_json=as_json)


@rules.command("list")
def list_(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the rules, and how many rows each has deleted."""
    lake = open_store(store)
    listed = []
    for rule in retention.current(lake).values():
        count = f"SELECT count(*) FROM drops WHERE lineage_id = {literal(rule.lineage_id)}"
        [(deleted,)] = lake.sql(count).fetchall()
        listed.append({**asdict(rule), "experiences_listed": deleted})
    none = "no rules; add one with `rlake retention add NAME --table T --where SQL`"
    render({"rules": listed}, listed or none, as_json=as_json)


@rules.command()
def drop(
    name: Annotated[str, argument("Name of the rule.")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a rule; rows that it deleted stay deleted."""
    retention.drop(open_store(store), name)
    render({"dropped": name}, f"removed rule `{name}`", as_json=as_json)
