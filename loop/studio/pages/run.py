"""One run: its jobs, and its curves, which move while it runs."""

import asyncio
import json
import shlex
from collections.abc import Sequence
from typing import Any

from nicegui import ui
from nicegui.events import EChartPointClickEventArguments

from ....store.errors import NotFoundError, RlakeError
from ....store.query import literal
from ...report.curves import POINTS, RATIOS, curves_sql
from ..curves import GrowingCurves, Points, of_run
from ..frame import Studio, View, address, notify_error, page
from ..live import WATCHED, Message, Watch
from ..run_status import runs
from ..widgets import chart, number, same_as, text, title

CHARTS = {
    "Reward": ("train/reward_mean", "explore/reward_mean", "eval/reward_mean"),
    "KL": ("train/kl",),
    "Entropy": ("train/entropy",),
    "Tokens a rollout": ("explore/tokens_per_row", "train/tokens_per_row"),
    "Lag": ("train/lag_mean", "train/lag_max"),
    "Clip fraction": ("train/clip_fraction",),
}
"""The charts of every run: title, and metrics."""
_ROW_SECONDS = 0.3
"""How long new points wait for the state of their run, in seconds."""


@page("/run", "Run")
async def show(view: View) -> None:
    """Show a run: `id`; `metrics` are more charts, by names that are separated by commas."""
    run_id = view["id"]
    found = await view.wait(runs(view.studio.queries, run_id))
    if not found:
        raise NotFoundError(f"no run `{run_id}` in this store; the page Runs lists them")
    [one] = found
    known = await view.query(
        f"SELECT DISTINCT name FROM metrics_current WHERE run_id = {literal(run_id)} ORDER BY name"
    )
    names = [one["name"] for one in known]
    more = [name for name in view["metrics"].split(",") if name in names]
    with ui.element("div").classes("bar"):
        title(run_id).classes("fill")
        ui.link("Rollouts", address("/rollouts", where=f"run_id = {literal(run_id)}"))
        ui.link("Compare", address("/runs"))
    if view.studio.can_write:
        _buttons(view, run_id)
    charts: dict[str, tuple[str, ...]] = {**CHARTS, **{name: (name,) for name in more}}

    async def draw() -> None:
        found = await view.wait(_points(view.studio, run_id, wanted))
        area.clear()
        with area:
            for name, metrics in charts.items():
                series = {metric: found[metric] for metric in metrics if metric in found}
                chart(name, series).on_point_click(_opens(run_id, tuple(series)))
        watch.drew([*found])

    wanted = [name for group in charts.values() for name in group]
    watch = Watch(address("/run/live", id=run_id, metrics=",".join(wanted)), draw)
    watch.props["state"] = _state(one)
    area = ui.element("div").classes("charts")
    await draw()
    ui.select(
        names,
        multiple=True,
        label="More metrics",
        value=more,
        on_change=lambda event: view.go(metrics=",".join(event.value)),
    ).props("outlined dense options-dense use-chips").style("max-width: 520px")
    with ui.expansion("Configuration").props("dense"):
        config = await view.query(
            "SELECT arg_max(config, created_at) AS config FROM job_events "
            f"WHERE run_id = {literal(run_id)} AND job <> 'evaluate'"
        )
        text("pre", json.dumps(json.loads(config[0]["config"] or "{}"), indent=1))
    listed = [m for m in wanted if m in RATIOS or m in names]
    same_as(sql=curves_sql([run_id], listed), command=f"rlake show {shlex.quote(run_id)}")


async def _points(studio: Studio, run_id: str, names: Sequence[str]) -> Points:
    limit = (POINTS + 1) * len(names)
    return of_run(
        (await studio.queries.rows(curves_sql([run_id], names), limit=limit)).rows, run_id, names
    )


class _Watched:
    """A run that is watched: its state, and curves that grow."""

    def __init__(self, studio: Studio, params: dict[str, str]) -> None:
        self._queries, self._run_id = studio.queries, params.get("id", "")
        names = params.get("metrics", "").split(",")
        self._curves = GrowingCurves(studio.store, self._run_id, names)
        self._asking: asyncio.Future[list[dict[str, Any]]] | None = None
        self._row: dict[str, Any] = {}
        self._state: dict[str, Any] = {}

    async def news(self) -> Message:
        """Return the points that are new, and the state if it is another one."""
        await self._ask()
        # last: what was read must be sent, so nothing may fail after it
        whole, points = await self._queries.call(self._curves.read, pool="live")
        state = _state(self._row | self._newest(self._row)) if self._row else {}
        news: Message = {} if state == self._state else {"state": state}
        self._state = state
        return news | ({"points": points, "whole": whole} if whole or points else {})

    async def _ask(self) -> None:
        """Ask for the run's row; points do not wait for one that takes long."""
        if self._asking is None:
            self._asking = asyncio.ensure_future(runs(self._queries, self._run_id))
            # asked for in any case, or asyncio logs the error of one that nobody waits for
            self._asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({self._asking}, timeout=_ROW_SECONDS)
        if self._asking.done():
            asked, self._asking = self._asking, None
            self._row = next(iter(asked.result()), {})

    def whole(self) -> Message:
        """Return the state and all points."""
        points = self._curves.points
        state = {"state": self._state} if self._state else {}
        return state | ({"points": points, "whole": True} if points else {})

    def _newest(self, one: dict[str, Any]) -> dict[str, Any]:
        """Return what the curves know of a later step than the row of a run, which costs more."""
        newest = {name: points[-1] for name, points in self._curves.points.items()}
        steps = [step for name, (step, _) in newest.items() if name.startswith("train/")]
        if not steps or max(steps) <= (one["step"] or 0):
            return {}
        known = {"reward": "train/reward_mean", "lag_max": "train/lag_max"}
        later = {name: newest[metric][1] for name, metric in known.items() if metric in newest}
        return later | {"step": int(max(steps))}


WATCHED["/run/live"] = _Watched


def _buttons(view: View, run_id: str) -> None:
    """Offer to stop the run, or to continue it, and show what it printed."""
    control = view.studio.control

    async def resume() -> None:
        try:
            await control.resume(run_id)
            ui.notify(f"{run_id} goes on")
        except RlakeError as error:
            notify_error(error)

    def stop() -> None:
        try:
            control.stop(run_id)
            ui.notify(f"{run_id} was asked to stop")
        except RlakeError as error:
            notify_error(error)

    def output() -> None:
        printed.set_text(control.output(run_id) or "It was not started here.")
        printed.set_visibility(True)

    with ui.element("div").classes("bar"):
        ui.button("Resume", on_click=resume).props("outline dense padding='4px 12px'")
        ui.button("Stop", on_click=stop).props("outline dense padding='4px 12px'")
        ui.button("Output", on_click=output).props("flat dense padding='4px 12px'")
    printed = text("pre", "")
    printed.set_visibility(False)


def _state(one: dict[str, Any]) -> dict[str, Any]:
    """Return what is shown of a run's row."""
    facts = {
        "step": f"{number(one['step'] or 0)} of {number(one['steps'])}",
        "steps/min": one["steps_per_minute"],
        "reward": one["reward"],
        "largest lag": one["lag_max"],
        "queued rows": one["fresh"],
        "stale rows": one["stale"],
        "failed rollouts": one["failed_rows"],
    }
    gone = "A process of this run is gone: continue it with `rlake run ... --resume`."
    return {
        "status": one["status"],
        "jobs": [f"{job['job']}: {job['status']}" for job in one["jobs"]],
        "facts": [
            (name, value if isinstance(value, str) else number(value))
            for name, value in facts.items()
            if value is not None
        ],
        "error": one["error"],
        "note": gone if one["status"] == "dead" else None,
    }


def _opens(run_id: str, metrics: tuple[str, ...]) -> Any:
    """Return what opens the rows of the step that was clicked."""

    def click(event: EChartPointClickEventArguments) -> None:
        point: Any = event.data  # x and y
        step, key = int(point[0]), literal(run_id)
        if metrics[event.series_index].startswith("explore/"):
            where = f"run_id = {key} AND batch = {step}"
        else:
            where = (
                "experience_id IN (SELECT experience_id FROM draws_current "
                f"WHERE run_id = {key} AND step = {step})"
            )
        ui.navigate.to(address("/rollouts", where=where))

    return click
