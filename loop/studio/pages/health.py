"""Store health: what the doctor finds, the size of each table, and what maintenance would do."""

from nicegui import ui

from ....store.doctor import Finding, diagnose
from ....store.errors import RlakeError, counted
from ....store.maintenance.report import Report
from ...runs.job import is_live
from ..frame import View, notify_error, page, show_error
from ..queries import Rows
from ..widgets import grid, heading, same_as, text, title

_LEVELS = {"error": "failed", "warning": "interrupted", "note": "running", "ok": "done"}
"""Levels of findings in the order in which they are shown, and their colors."""


@page("/health", "Store health", section="Store", order=9)
async def show(view: View) -> None:
    """Show the findings of `rlake doctor`, and the sizes of the tables."""
    title("Store health")
    found = await view.call(_diagnosed, view)
    worst = [one for one in found if one.level in ("error", "warning")]
    said = f"To look at: {counted(len(worst), 'finding')}." if worst else "Nothing is wrong."
    ui.label(said).classes("soft")
    with ui.element("div").classes("card"):
        for level in _LEVELS:
            for one in found:
                if one.level == level:
                    _finding(one)
    heading("Tables")
    try:
        report = await view.call(_planned, view)
    except RlakeError as error:  # a snapshot is not maintained
        show_error(str(error))
    else:
        grid(await view.call(_sizes, view, report), max_height=700)
    if view.studio.can_write:

        async def maintain() -> None:
            button.disable()
            try:
                done = await view.write(view.store.maintain)
                ui.notify(done.busy or f"done in {done.seconds:.1f} s")
            except RlakeError as error:
                notify_error(error)
            view.go()

        button = ui.button("Maintain now", on_click=maintain).props("outline")
    same_as(command="rlake doctor && rlake maintain --dry-run")


def _diagnosed(view: View) -> list[Finding]:
    return diagnose(view.store, is_live=is_live)


def _planned(view: View) -> Report:
    return view.store.maintain(dry_run=True)


def _finding(one: Finding) -> None:
    with ui.element("div").classes("bar"):
        ui.label(one.level).classes(f"status {_LEVELS[one.level]}").style("min-width: 62px")
        text("span", one.what, "fill")
        if one.way_out:
            text("span", one.way_out, "soft")


def _sizes(view: View, report: Report) -> Rows:
    """Return a row for each table: rows, files, megabytes, versions, rows without an index."""
    columns = ["table", "rows", "files", "files after", "MB", "versions", "versions after"]
    columns += ["rows not indexed"]
    rows = [
        (
            one.table,
            view.store.count(one.table),
            one.before.fragments,
            one.after.fragments,
            round(one.before.num_bytes / 1e6, 2),
            one.before.versions,
            one.after.versions,
            one.before.new_rows,
        )
        for one in report.tables
    ]
    rows.sort(key=lambda row: -row[4])
    return Rows(columns, ["VARCHAR", *["number"] * 7], rows, is_cut=False)
