"""Tasks: pass rates over versions, the hardest, those solved lately, those forgotten."""

from typing import Any

from nicegui import ui

from ....store.query import literal
from ..frame import View, address, page
from ..queries import Rows
from ..widgets import chart, empty, grid, heading, same_as, title

_LISTED = 100
_CURVES = 8
_POINTS = 200
ORDERS = {
    "Hardest": ("true", "pass_rate, groups DESC"),
    "Solved lately": ("newest > 0 AND best_before = 0", "solved_at DESC, task_id"),
    "Forgotten": ("newest = 0 AND best_before > 0", "best_before DESC, task_id"),
}
"""Lists of tasks: title, condition, order."""


def _groups(run_id: str, taskset: str) -> str:
    """Return the groups that were scored, of a run and a taskset, as a SELECT."""
    which = "num_scored > 0" + (f" AND run_id = {literal(run_id)}" if run_id else "")
    of_set = f" AND t.taskset = {literal(taskset)}" if taskset else ""
    return (
        "SELECT g.*, coalesce(t.taskset, 'not stored') AS taskset, t.prompt_text FROM groups g "
        f"LEFT JOIN tasks t USING (task_id) WHERE {which}{of_set}"
    )


def tasks_sql(run_id: str, taskset: str, where: str, order: str) -> str:
    """Return a SELECT of tasks: their pass rate over all, in the newest group, and before."""
    return f"""
WITH tried AS ({_groups(run_id, taskset)}),
placed AS (
    SELECT *, row_number() OVER (PARTITION BY task_id
        ORDER BY policy_version DESC, batch DESC, group_id DESC) AS place FROM tried),
by_task AS (
    SELECT task_id, any_value(taskset) AS taskset, count(*) AS groups,
           sum(num_passed) / sum(num_scored) AS pass_rate,
           max(pass_rate) FILTER (place = 1) AS newest,
           max(pass_rate) FILTER (place > 1) AS best_before,
           min(policy_version) FILTER (pass_rate > 0) AS solved_at,
           left(any_value(prompt_text), 160) AS prompt
    FROM placed GROUP BY task_id)
SELECT * FROM by_task WHERE {where} ORDER BY {order} LIMIT {_LISTED}""".strip()


def over_versions_sql(run_id: str, taskset: str) -> str:
    """Return a SELECT of the pass rate of each taskset over policy versions."""
    return f"""
WITH tried AS ({_groups(run_id, taskset)}),
cut AS (SELECT *, max(policy_version) OVER () // {_POINTS} + 1 AS width FROM tried)
SELECT taskset, max(policy_version) AS policy_version,
       sum(num_passed) / sum(num_scored) AS pass_rate
FROM cut WHERE policy_version IS NOT NULL
GROUP BY taskset, policy_version // width ORDER BY taskset, policy_version""".strip()


@page("/tasks", "Tasks", section="Rows", order=3)
async def show(view: View) -> None:
    """Show how a `run` (or all) does on the tasks of a `taskset` (or all)."""
    title("Tasks")
    run_id, taskset = view["run"], view["taskset"]
    with ui.element("div").classes("bar"):
        await _choice(view, "run", "SELECT DISTINCT run_id FROM groups ORDER BY 1")
        await _choice(view, "taskset", "SELECT DISTINCT taskset FROM tasks ORDER BY 1")
    sql = over_versions_sql(run_id, taskset)
    found = await view.rows(sql, limit=_POINTS * (_CURVES + 1))
    curves: dict[str, list[tuple[Any, Any]]] = {}
    for name, version, rate in found.rows:
        curves.setdefault(name, []).append((version, rate))
    if curves:
        shown = dict(list(curves.items())[:_CURVES])
        chart("Pass rate over versions of the policy", shown, x="policy version")
    else:
        empty("No rollout has a reward and a version of a policy yet.")
    for name, (where, order) in ORDERS.items():
        heading(name)
        listed = await view.rows(tasks_sql(run_id, taskset, where, order))
        if listed.rows:
            grid(listed, links=_links(listed, run_id), widths=_WIDTHS, max_height=300)
        else:
            empty("No task.")
    same_as(sql=tasks_sql(run_id, taskset, *ORDERS["Hardest"]))


_WIDTHS = {"task_id": 150, "taskset": 130, "groups": 80, "pass_rate": 95, "newest": 85}
_WIDTHS |= {"best_before": 110, "solved_at": 95}


def _links(found: Rows, run_id: str) -> list[str | None]:
    of_run = f" AND run_id = {literal(run_id)}" if run_id else ""
    return [
        address("/rollouts", where=f"task_id = {literal(str(row[0]))}{of_run}")
        for row in found.rows
    ]


async def _choice(view: View, name: str, sql: str) -> None:
    """Offer the values of a parameter; the empty one means all."""
    found = await view.rows(sql)
    values = {"": f"all {name}s"} | {str(row[0]): str(row[0]) for row in found.rows if row[0]}
    values.setdefault(view[name], view[name])
    made = ui.select(
        values, value=view[name], label=name, on_change=lambda event: view.go(**{name: event.value})
    )
    made.props("outlined dense options-dense").style("min-width: 200px")
