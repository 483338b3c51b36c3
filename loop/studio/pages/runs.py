"""What runs now and what ran: progress, throughput, lag, queue, failures; and runs compared."""

from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui

from ....store.errors import NotFoundError, RlakeError
from ....store.query import is_in
from ...config.load import recipes
from ...report.curves import POINTS, curves_sql
from ...report.details import differences
from ..curves import of_run
from ..frame import Studio, View, address, notify_error, page
from ..live import WATCHED, Message, Watch
from ..queries import Rows
from ..run_status import RUNS, runs
from ..widgets import (
    chart,
    column,
    empty,
    grid,
    grid_options,
    grid_rows,
    heading,
    records,
    same_as,
    title,
)

_SHOWN = {
    "run_id": "run",
    "status": "status",
    "progress": "step",
    "steps_per_minute": "steps/min",
    "reward": "reward",
    "lag_max": "lag",
    "fresh": "queued",
    "stale": "stale",
    "failed_rows": "failed",
    "active_at": "last step",
    "error": "error",
}
_WIDTHS = (130, 108, 100, 96, 78, 60, 82, 66, 70, 150, 90)
COMPARED = ("train/reward_mean", "eval/reward_mean", "eval/accuracy", "train/kl", "train/entropy")
COMPARED += ("train/lag_mean", "train/loss")


@page("/runs", "Runs", section="Runs", order=1)
async def show(view: View) -> None:
    """List the runs; with `compare=A,B`, show them side by side."""
    chosen = [name for name in view["compare"].split(",") if name]
    if len(chosen) > 1:
        await _compare(view, chosen)
        return
    title("Runs")
    columns = [
        column(i, name, "number" if i in range(3, 9) else "VARCHAR", width=_WIDTHS[i])
        for i, name in enumerate(_SHOWN.values())
    ]
    columns[0] |= {"flex": 1, "minWidth": 130}
    columns[-1] |= {"flex": 1}
    columns[1][":cellClass"] = "p => 'status ' + p.value"
    options = grid_options(columns, rowData=[], rowSelection={"mode": "multiRow"})
    made = ui.aggrid(options | {":getRowId": "p => p.data.c0"}, auto_size_columns=False)
    made.classes("links")
    none = empty("No run yet: `rlake run grpo_arithmetic` makes one.")

    async def compare() -> None:
        rows = await made.get_selected_rows()
        if len(rows) < 2:
            ui.notify("Select two runs or more by their boxes")
            return
        view.go(compare=",".join(str(row["c0"]) for row in rows))

    ui.button("Compare selected", on_click=compare).props("outline dense padding='4px 12px'")

    async def draw() -> None:
        rows = made.options["rowData"] = _rows(await view.wait(runs(view.studio.queries)))
        none.set_visibility(not rows)
        made.set_visibility(bool(rows))
        made.style(f"height: {min(460, 52 + 32 * len(rows))}px")
        made.update()
        watch.drew([row["c0"] for row in rows])

    if view.studio.can_write:
        _start(view)
    watch = Watch("/runs/live", draw)
    await draw()
    same_as(sql=RUNS.strip(), command="rlake show RUN")


def _rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    values = [
        [
            f"{one['step'] or 0} / {one['steps'] or '?'}" if n == "progress" else one[n]
            for n in _SHOWN
        ]
        for one in found
    ]
    return grid_rows(values, [address("/run", id=one["run_id"]) for one in found])


class _Watched:
    """The list of runs, while it is watched."""

    def __init__(self, studio: Studio, _: dict[str, str]) -> None:
        self._queries, self._rows = studio.queries, None

    async def news(self) -> Message:
        """Return the rows of the list."""
        self._rows = _rows(await runs(self._queries))
        return {"rows": self._rows}

    def whole(self) -> Message:
        """Return the rows as they were last."""
        return {} if self._rows is None else {"rows": self._rows}


WATCHED["/runs/live"] = _Watched


def _start(view: View) -> None:
    """Offer to start a run of a recipe or a YAML file."""
    with ui.element("div").classes("bar"):
        config = ui.input("Recipe or YAML file", autocomplete=recipes()).props("outlined dense")
        changes = ui.input("Changes", placeholder="trainer.steps=100 name=second")
        changes.props("outlined dense").classes("fill")

        async def start() -> None:
            button.disable()
            try:
                given = (config.value or "").strip(), (changes.value or "").split()
                ui.navigate.to(address("/run", id=await view.studio.control.start(*given)))
            except RlakeError as error:
                notify_error(error)
            finally:
                button.enable()

        button = ui.button("Start", on_click=start).props("unelevated")


async def _compare(view: View, names: list[str]) -> None:
    title("Compare " + ", ".join(names))
    configs = await view.query(
        "SELECT run_id, arg_max(config, created_at) AS config FROM job_events "
        f"WHERE {is_in('run_id', names)} AND job <> 'evaluate' GROUP BY run_id"
    )
    known = {one["run_id"]: one["config"] for one in configs}
    missing = [name for name in names if name not in known]
    if missing:
        raise NotFoundError(f"no run `{missing[0]}` in this store; list them on the page Runs")
    limit = (POINTS + 1) * len(COMPARED) * len(names)
    rows = (await view.rows(curves_sql(names, COMPARED), limit=limit)).rows
    found = {name: of_run(rows, name, COMPARED) for name in names}
    with ui.element("div").classes("charts"):
        for metric in COMPARED:
            series = {name: found[name][metric] for name in names if metric in found[name]}
            if series:
                chart(metric, series)
    last = [
        {"metric": m} | {name: (found[name].get(m) or [(0, None)])[-1][1] for name in names}
        for m in COMPARED
        if any(m in found[name] for name in names)
    ]
    heading("Last values")
    grid(records(last, "metric", *names))
    heading("Configuration: what differs")
    rows = [row for row in differences(*(known[name] for name in names)) if row[0] != "name"]
    if rows:
        grid(Rows(["key", *names], ["VARCHAR"] * (1 + len(names)), [*rows], is_cut=False))
    else:
        empty("Their configurations are the same but for the name.")
    same_as(
        sql="SELECT run_id, job, name, arg_max(value, step) AS last FROM metrics_current "
        f"WHERE {is_in('run_id', names)} GROUP BY ALL ORDER BY name, run_id"
    )
