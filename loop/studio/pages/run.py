"""One run: its jobs, and its curves, which move while it runs."""

import json
import shlex
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from nicegui import ui
from nicegui.events import EChartPointClickEventArguments

from ....store.errors import NotFoundError, RlakeError
from ....store.query import literal
from ..curves import LENGTH, Curves, curves, curves_sql
from ..frame import View, address, notify_error, page
from ..run_status import runs
from ..widgets import chart, facts, moved, number, same_as, status, text, title

CHARTS = {
    "Reward": ("train/reward_mean", "explore/reward_mean", "eval/reward_mean"),
    "KL": ("train/kl",),
    "Entropy": ("train/entropy",),
    "Length": (LENGTH,),
    "Lag": ("train/lag_mean", "train/lag_max"),
    "Clip fraction": ("train/clip_fraction",),
}
"""The charts of every run: title, and metrics."""


@page("/run", "Run")
async def show(view: View) -> None:
    """Show a run: `id`; `metrics` are more charts, by names that are separated by commas."""
    run_id = view["id"]
    if not await runs(view, run_id):
        raise NotFoundError(f"no run `{run_id}` in this store; the page Runs lists them")
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
    state = ui.element("div").classes("card")
    charts: dict[str, tuple[str, ...]] = {**CHARTS, **{name: (name,) for name in more}}
    wanted = [name for group in charts.values() for name in group]
    shown: dict[str, Any] = {}

    async def refresh_state() -> None:
        found = await runs(view, run_id)
        if found != shown.get("state"):
            shown["state"], [one] = found, found
            state.clear()
            with state:
                _state(one)

    async def refresh() -> None:
        await refresh_state()  # also when its process ends without a word
        found = await curves(view, run_id, wanted)
        if found is shown.get("curves"):
            return
        series = {name: _series(found, metrics) for name, metrics in charts.items()}
        if [*map(len, series.values())] == shown.get("drawn"):
            ui.run_javascript(_script(found, tuple(charts.items())))
        else:
            area.clear()
            with area:
                for name, one in series.items():
                    chart(name, one).on_point_click(_opens(run_id, tuple(one)))
        shown.update(curves=found, drawn=[*map(len, series.values())])

    area = ui.element("div").classes("charts")
    await view.live(None, refresh)
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
    listed = [m for m in names if any(m in group for group in charts.values())]
    same_as(sql=curves_sql(run_id, listed), command=f"rlake show {shlex.quote(run_id)}")


def _series(found: Curves, metrics: Sequence[str]) -> dict[str, Any]:
    return {name: found[name] for name in metrics if name in found}


@lru_cache(16)
def _script(found: Curves, charts: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    return moved({name: _series(found, metrics) for name, metrics in charts})


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


def _state(one: dict[str, Any]) -> None:
    with ui.element("div").classes("bar"):
        status(one["status"])
        for job in one["jobs"]:
            ui.label(f"{job['job']}: {job['status']}").classes("soft")
    facts(
        {
            "step": f"{number(one['step'] or 0)} of {number(one['steps'])}",
            "steps/min": one["steps_per_minute"],
            "reward": one["reward"],
            "largest lag": one["lag_max"],
            "queued rows": one["fresh"],
            "stale rows": one["stale"],
            "failed rollouts": one["failed_rows"],
        }
    )
    if one["error"]:
        text("pre", one["error"])
    if one["status"] == "dead":
        ui.label(
            "A process of this run is gone: continue it with `rlake run ... --resume`."
        ).classes("soft")


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
