"""Commands that care for a store: maintain, doctor, retention."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from .app import CARE, JsonOption, StoreOption, app, listen, open_store
from .tables import print_json, print_rows, screen

_MARKS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


@app.command(rich_help_panel=CARE)
def maintain(
    store: StoreOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell what would be done.")
    ] = False,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="SECONDS", help="Keep versions that were the newest one since; 600."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Apply retention rules, merge small files, keep indexes up, remove versions nobody needs.

    Safe while jobs write and read. What snapshots and branches need stays.
    """
    from ...store.maintenance import GRACE_SECONDS
    from ...store.maintenance.report import COLUMNS

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
    store: StoreOption = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every file; compare each row with its digest.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Look for what is wrong with a store, and say the way out; exit with 1 when something is."""
    from ...operators.sandbox import protection
    from ...store.connect import look
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


def _print_finding(finding: Any) -> None:
    from rich.text import Text

    line = Text(f"{finding.level:<8} ", style=_MARKS[finding.level])
    screen().print(line + Text(finding.what, style="none"), soft_wrap=True)
    if finding.way_out:
        screen().print(Text(f"{'':<8} -> {finding.way_out}"), soft_wrap=True)


rules = typer.Typer(help="Rules, in SQL, of which rows may be forgotten; `maintain` applies them.")
app.add_typer(rules, name="retention", rich_help_panel=CARE, no_args_is_help=True)


@rules.command()
def add(
    name: Annotated[str, typer.Argument(help="What to call the rule.")],
    table: Annotated[str, typer.Option(help="experiences, scores, derived or embeddings.")],
    where: Annotated[
        str, typer.Option(help='Rows that may go: "created_at < now() - INTERVAL 90 DAY".')
    ],
    store: StoreOption = None,
    note: Annotated[str | None, typer.Option(help="Why.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Let a rule stand; see what it would do with `rlake maintain --dry-run`.

    Rows of runs that are not done stay, and snapshots still show what is deleted later.
    """
    from ...store.maintenance import retention

    rule = retention.add(open_store(store), name, table=table, where=where, note=note)
    if as_json:
        print_json(asdict(rule))
    else:
        print(f"rule `{name}` stands; `rlake maintain --dry-run` counts what it names")


@rules.command("list")
def list_(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the rules that stand, and how many rows each has deleted."""
    from ...store.maintenance import retention
    from ...store.query import literal

    lake = open_store(store)
    listed = []
    for rule in retention.current(lake).values():
        count = f"SELECT count(*) FROM drops WHERE lineage_id = {literal(rule.lineage_id)}"
        [(deleted,)] = lake.sql(count).fetchall()
        listed.append({**asdict(rule), "experiences_listed": deleted})
    if as_json:
        print_json({"rules": listed})
    elif not listed:
        print("no rules stand; add one with `rlake retention add NAME --table T --where SQL`")
    else:
        print_rows(list(listed[0]), [list(rule.values()) for rule in listed])


@rules.command()
def drop(
    name: Annotated[str, typer.Argument(help="The rule.")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a rule back; what it deleted stays deleted."""
    from ...store.maintenance import retention

    retention.drop(open_store(store), name)
    if as_json:
        print_json({"dropped": name})
    else:
        print(f"rule `{name}` stands no more")
