"""Snapshots and branches: what there is, what differs between two of them, and going back."""

import shlex
from typing import Any

from nicegui import ui

from ....store import Store, branches, snapshots
from ....store.branches import Branch
from ....store.errors import RlakeError, StoreError, counted
from ....store.query import literal
from ....store.snapshots import NOW, Snapshot
from ...runs.job import all_killed
from ..frame import View, address, notify_error, page, show_error
from ..graph import Box, graph, limited
from ..widgets import empty, grid, heading, records, same_as, text, title

_SQL = """SELECT name, note, created_at FROM snapshots
QUALIFY row_number() OVER (PARTITION BY name ORDER BY created_at DESC) = 1
   AND is_dropped IS NOT true
ORDER BY created_at DESC"""


@page("/snapshots", "Snapshots", section="Data", order=3)
async def show(view: View) -> None:
    """Show snapshots and branches, and what changed from `first` to `second`."""
    title("Snapshots and branches")
    known = await view.call(snapshots.current, view.store)
    lines = await view.call(_branches, view.store)
    with ui.element("div").classes("card"):
        graph(*_tree(view.store, known, lines))
    if view.studio.can_write:
        _create(view)
    if not known:
        empty("No snapshot yet: `rlake snapshot create NAME` takes one.")
    first = view["first"] or next(reversed(known), NOW)
    second = view["second"] or NOW
    with ui.element("div").classes("card"):
        await _diff(view, first, second, [*reversed(known), NOW])
    if lines:
        with ui.element("div").classes("card"):
            heading("Branches")
            rows = [
                {
                    "name": one.name,
                    "left from": one.parent or "the store itself",
                    "created_at": one.created_at,
                    "rows added": _added(added),
                }
                for one, added in lines
            ]
            grid(records(rows), widths={"created_at": 170})
    diff = f"rlake snapshot diff {shlex.quote(first)} {shlex.quote(second)}"
    same_as(sql=_SQL, command=f"{diff}\nrlake snapshot list\nrlake branch list")


def _branches(store: Store) -> list[tuple[Branch, dict[str, int] | None]]:
    """Return branches with the rows that each added; None for one that is damaged."""
    found = []
    for one in branches.current(store).values():
        try:
            added = {name: n for name, n in branches.rows_added(store, one).items() if n}
        except StoreError:
            added = None
        found.append((one, added))
    return found


def _added(rows: dict[str, int] | None) -> str:
    if rows is None:
        return "cannot be read; see `rlake doctor`"
    return ", ".join(f"{name} {n:+,}" for name, n in rows.items()) or "none"


def _tree(
    store: Store, known: dict[str, Snapshot], lines: list[tuple[Branch, dict[str, int] | None]]
) -> tuple[dict[str, Box], list[tuple[str, str]]]:
    """Return the boxes of snapshots before the store, and of branches behind what they left."""
    boxes = limited(
        {
            f"snapshot {one.name}": Box(
                0,
                one.name,
                one.note or f"{one.created_at:%Y-%m-%d %H:%M}",
                address("/snapshots", first=one.name),
                "kept",
            )
            for one in reversed(known.values())
        }
    )
    drawn = [(key, "store") for key in boxes]
    here = f"branch {store.branch_name}" if store.branch_name else "the store"
    boxes["store"] = Box(1, here, NOW, None, "rows")
    places = {None: ("store", 1), store.branch_name: ("store", 1)}
    for one, added in lines[:100]:
        if one.name == store.branch_name:
            continue
        parent, column = places.get(one.parent, ("store", 1))
        key = f"branch {one.name}"
        rows = "damaged" if added is None else f"{counted(sum(added.values()), 'row')} added"
        boxes[key] = Box(column + 1, one.name, f"branch, {rows}", None, "policy")
        drawn.append((parent, key))
        places[one.name] = (key, column + 1)
    return boxes, drawn


async def _diff(view: View, first: str, second: str, names: list[str]) -> None:
    heading("What changed")

    def choose(**to: Any) -> None:
        view.go(**{"first": first, "second": second} | to)

    with ui.element("div").classes("bar"):
        for name, value, label in (("first", first, "From"), ("second", second, "To")):
            chooser = ui.select(list(dict.fromkeys([value, *names])), value=value, label=label)
            chooser.on_value_change(lambda event, name=name: choose(**{name: event.value}))
            chooser.props("outlined dense").style("width: 300px")
        if view.studio.can_write and first != NOW:
            ui.button("Restore", on_click=lambda: _restore(view, first)).props("outline").tooltip(
                f"go back to {first}"
            )
    found = await view.call(view.store.diff, first, second)
    if not found.tables:
        ui.label("Both hold the same rows.").classes("soft")
        return
    tables = [vars(one) | {"versions": "{} to {}".format(*one.versions)} for one in found.tables]
    grid(records(tables, "table", "added", "removed", "versions"))
    if found.experiences:
        heading("Rollouts by run")
        links = [
            address("/rollouts", where=f"run_id = {literal(one['run_id'])}")
            if one["run_id"]
            else None
            for one in found.experiences
        ]
        grid(records(found.experiences), links=links, max_height=300)


def _create(view: View) -> None:
    async def create() -> None:
        name, said = str(field.value or "").strip(), str(note.value or "").strip() or None
        try:
            await view.write(lambda: view.store.snapshot(name, note=said))
        except RlakeError as error:
            notify_error(error)
            return
        view.go(first=name, second=NOW)

    with ui.element("div").classes("bar"):
        field = ui.input("Name of a new snapshot").props("outlined dense").style("width: 260px")
        note = ui.input("Why").props("outlined dense").classes("fill")
        ui.button("Take a snapshot", on_click=create).props("outline")


async def _restore(view: View, name: str) -> None:
    """Restore the store to a snapshot, after a confirmation that says what will change."""
    changed = await view.call(view.store.diff, name, NOW)
    with ui.dialog() as dialog, ui.element("div").classes("card"):
        text("div", f"Restore all tables to `{name}`?", "title")
        for one in changed.tables:
            if one.table != "snapshots":  # which a restore keeps
                rows = counted(one.added, "row")
                ui.label(f"{one.table}: {rows} removed, {one.removed:,} back")
        ui.label("The state before becomes a snapshot, by which this can be undone.").classes(
            "soft"
        )
        with ui.element("div").classes("bar"):
            ui.button("Restore", on_click=lambda: dialog.submit("restore")).props("unelevated")
            ui.button("Cancel", on_click=dialog.close).props("flat")
    if not await dialog:
        return

    def restore() -> Any:
        return view.store.restore(name, force=all_killed(view.store))

    try:
        done = await view.write(restore)
    except RlakeError as error:
        show_error(str(error))
        return
    view.go(first=done.undo, second=NOW)
