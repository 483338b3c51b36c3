"""What a run's stored history answers: the audits, and the expectations that were checked."""

import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nicegui import ui

from ....store.query import literal
from ...audits import bias, drop, oddities, off_policy, value
from ...audits.drop import parse_steps
from ..frame import View, page
from ..widgets import empty, grid, heading, number, records, same_as, text, title

_RUNS = """SELECT run_id FROM job_events WHERE job <> 'evaluate'
GROUP BY run_id ORDER BY max(created_at) DESC"""
_EXPECTATIONS = """SELECT created_at, name, checked, severity, passed, num_failing, num_rows,
       row_ids, run_id
FROM expectations{} ORDER BY created_at DESC LIMIT 200"""
_FIELDS = {
    "steps": "These steps, such as 20:39",
    "against": "Compared with these",
    "weight": "A rule in SQL, such as finish_reason = 'stop'",
    "target": "Or log-probs of another policy, such as teacher_logprobs",
    "where": "Of rows where, in SQL",
    "reward": "By another reward, such as score:strict@2",
    "runs": "Runs that leave out a source, separated by commas",
}


@page("/audits", "Audits", section="Runs", order=3)
async def show(view: View) -> None:
    """Audit `run`: `steps` are compared `against` others, `weight` or `target` is estimated."""
    title("Audits")
    runs = [str(row[0]) for row in (await view.rows(_RUNS)).rows]
    run_id = view["run"] or next(iter(runs), "")
    if run_id:
        chooser = ui.select(list(dict.fromkeys([run_id, *runs])), value=run_id, label="Run")
        chooser.on_value_change(lambda event: view.go(run=event.value, steps="", against=""))
        chooser.props("outlined dense").style("width: 340px")
        if not view["steps"]:
            view.params |= await _halves(view, run_id)
        _audits(view, run_id)
    else:
        empty("No run to audit yet: `rlake run grpo_arithmetic` makes one.")
    checked = _EXPECTATIONS.format(f" WHERE run_id = {literal(run_id)}" if view["run"] else "")
    with _card("Expectations that were checked"):
        found = await view.rows(checked)
        if found.rows:
            grid(found, widths={"name": 220, "checked": 220})
        else:
            where = "`expect` in a configuration or a pipeline, or `rlake check`"
            ui.label(f"None yet: they come from {where}.").classes("soft")
    same_as(sql=checked, command="\n".join(_commands(view, run_id or "RUN")))


def _audits(view: View, run_id: str) -> None:
    """Ask all audits at once; each shows its answer when it has one."""
    with ui.element("div").classes("two"):
        _audit(view, "Trained on and sampled", _bias, run_id)
        _audit(view, "Rewards and texts", _oddities, run_id)
    _audit(view, "Why did the reward change?", _drop, run_id, "steps", "against")
    rules = ("weight", "target", "where", "reward")
    _audit(view, "What would a rule or another policy have earned?", _off_policy, run_id, *rules)
    _audit(view, "Which rows moved the policy most?", _value, run_id, "runs")


def _audit(
    view: View, name: str, ask: Callable[[View, str], Awaitable[None]], run_id: str, *fields: str
) -> None:
    with _card(name):
        if fields:
            _form(view, *fields)
        answer = ui.element("div").style("display: contents")
    view.draw(answer, partial(ask, view, run_id))


async def _halves(view: View, run_id: str) -> dict[str, str]:
    """Return the second half of a run's steps and the first, as parameters."""
    [(first, last)] = (
        await view.rows(
            f"SELECT min(step), max(step) FROM draws_current WHERE run_id = {literal(run_id)}"
        )
    ).rows
    if first is None or first == last:
        return {}
    middle = (first + last) // 2
    return {"steps": f"{middle + 1}:{last}", "against": f"{first}:{middle}"}


def _card(name: str) -> ui.element:
    with ui.element("div").classes("card") as made:
        heading(name)
    return made


def _form(view: View, *names: str) -> None:
    """Show fields for parameters of the address; Enter or the button asks with them."""
    fields: dict[str, ui.input] = {}

    def ask() -> None:
        view.go(**{name: field.value for name, field in fields.items()})

    with ui.element("div").classes("bar"):
        for name in names:
            fields[name] = ui.input(label=_FIELDS[name], value=view[name])
            fields[name].props("outlined dense").classes("fill").on("keydown.enter", ask)
        ui.button("Ask", on_click=ask).props("outline")


def _says(findings: Sequence[str], silent: str, facts: Sequence[str] = ()) -> None:
    """Show what an audit found as sentences, or that it found nothing."""
    for finding in findings:
        text("div", finding, "finding")
    if not findings and silent:
        text("div", silent, "finding none")
    for fact in facts:
        text("div", fact, "soft")


def _table(rows: Sequence[Mapping[str, Any]], *names: str) -> None:
    if rows:
        with ui.expansion("The numbers").props("dense"):
            grid(records(rows, *names))


async def _bias(view: View, run_id: str) -> None:
    found = await view.call(bias, view.store, run_id)
    _says(
        found.findings,
        "No finding: the rows trained on differ from those sampled in nothing.",
        found.facts,
    )
    _table(found.bins, "dimension", "bin", "rows", "trained", "low", "high", "rest", "p")


async def _oddities(view: View, run_id: str) -> None:
    found = await view.call(oddities, view.store, run_id)
    _says(found.findings, f"No finding: nothing is odd in {number(found.num_rows)} rows.")
    _table([*found.judgments, *found.odd])


async def _drop(view: View, run_id: str) -> None:
    if not (view["steps"] or view["against"]):
        ui.label("Compares two ranges of steps, once the run has two steps.").classes("soft")
        return
    ranges = parse_steps(view["steps"], "steps"), parse_steps(view["against"], "against")
    found = await view.call(drop, view.store, run_id, *ranges)
    first, second = found.reward_mean
    whole = (
        f"Mean reward {first:.4f} → {second:.4f}: {found.change:+.4f} "
        f"(95 %: {found.low:+.4f} to {found.high:+.4f}, p {found.p:.2g})"
    )
    _says(found.findings, "No finding: the change is within chance.", [whole])
    _table(found.splits)


async def _off_policy(view: View, run_id: str) -> None:
    weight, target = view["weight"] or None, view["target"] or None
    if not (weight or target):
        ui.label("By importance sampling on the logged rollouts; none is made.").classes("soft")
        return

    def ask() -> Any:
        more = {name: view[name] or None for name in ("where", "reward")}
        return off_policy(view.store, run_id, weight=weight, target=target, **more)

    found = await view.call(ask)
    rows = (
        f"{number(found.num_rows)} rows of {number(found.num_tasks)} tasks, worth "
        f"{found.effective_rows:.1f}; left out: {number(found.num_left_out)} rows, and "
        f"{number(found.num_without_support)} tasks without support"
    )
    refused = [f"Not estimated: {found.refusal}"] if found.refusal else []
    _says([*refused, *found.findings], "", [rows])
    grid(records([vars(value) for value in found.values]))


async def _value(view: View, run_id: str) -> None:
    def ask() -> Any:
        return value(view.store, run_id, against=_runs(view))

    found = await view.call(ask)
    silent = "No finding: no kind of rows moved the policy more than others."
    _says(found.findings, silent, found.facts)
    for rows in (found.comparisons, found.bins, found.top):
        _table(rows)


def _runs(view: View) -> list[str]:
    return [name for part in view["runs"].split(",") if (name := part.strip())]


def _commands(view: View, run_id: str) -> list[str]:
    of = f"--run {shlex.quote(run_id)}"
    made = [f"rlake audit bias {of}", f"rlake audit oddities {of}"]
    left_out = [f"--against {shlex.quote(name)}" for name in _runs(view)]
    made.append(" ".join([f"rlake audit value {of}", *left_out]))
    asked = (
        ("drop", ("steps", "against")),
        ("off-policy", ("weight", "target", "where", "reward")),
    )
    for command, names in asked:
        given = [f"--{name} {shlex.quote(view[name])}" for name in names if view[name]]
        if given:
            made.append(f"rlake audit {command} {of} {' '.join(given)}")
    return made
