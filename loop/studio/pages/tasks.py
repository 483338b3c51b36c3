"""Tasks: pass rates over versions, the hardest, those solved lately, those forgotten."""

from typing import Any

from nicegui import ui

from ....store.query import literal
from ..frame import View, address, page
from ..queries import Rows
from ..widgets import chart, empty, grid, heading, same_as, title

_EVAL = ":eval-"
_RUN = f"split_part(run_id, '{_EVAL}', 1)"
"""SQL of the run that a run, or an evaluation such as `RUN:eval-001`, belongs to."""
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
    """Return the groups that were scored, of a run and a taskset, as a SELECT.

    Those of a run's evaluations are the run's.
    """
    which = "num_scored > 0" + (f" AND {_of_run(run_id)}" if run_id else "")
    of_set = f" AND t.taskset = {literal(taskset)}" if taskset else ""
    return (
        f"SELECT g.* EXCLUDE (run_id), {_RUN} AS run_id, contains(run_id, '{_EVAL}') AS is_eval, "
        "coalesce(t.taskset, 'not stored') AS taskset, t.prompt_text FROM groups g "
        f"LEFT JOIN tasks t USING (task_id) WHERE {which}{of_set}"
    )


def tasks_sql(run_id: str, taskset: str, where: str, order: str) -> str:
    """Return a SELECT of tasks: their pass rate over all, in the newest group, and before.

    Each run is apart: versions of two runs are no sequence.
    """
    return f"""
WITH tried AS ({_groups(run_id, taskset)}),
placed AS (
    SELECT *, row_number() OVER (PARTITION BY run_id, task_id
        ORDER BY policy_version DESC, batch DESC, group_id DESC) AS place FROM tried),
by_task AS (
    SELECT task_id, run_id, any_value(taskset) AS taskset, count(*) AS groups,
           sum(num_passed) / sum(num_scored) AS pass_rate,
           max(pass_rate) FILTER (place = 1) AS newest,
           max(pass_rate) FILTER (place > 1) AS best_before,
           min(policy_version) FILTER (pass_rate > 0) AS solved_at,
           left(any_value(prompt_text), 160) AS prompt
    FROM placed GROUP BY task_id, run_id)
SELECT * FROM by_task WHERE {where} ORDER BY {order}, run_id LIMIT {_LISTED}""".strip()


def over_versions_sql(run_id: str, taskset: str) -> str:
    """Return a SELECT of the pass rate of each run's tasksets over policy versions."""
    return f"""
WITH tried AS ({_groups(run_id, taskset)}),
cut AS (SELECT *, max(policy_version) OVER (PARTITION BY run_id) // {_POINTS} + 1 AS width
    FROM tried)
SELECT run_id, is_eval, taskset, max(policy_version) AS policy_version,
       sum(num_passed) / sum(num_scored) AS pass_rate
FROM cut WHERE policy_version IS NOT NULL
GROUP BY run_id, is_eval, taskset, policy_version // width
ORDER BY run_id, is_eval, taskset, policy_version""".strip()


@page("/tasks", "Tasks", section="Rows", order=3)
async def show(view: View) -> None:
    """Show how a `run` (or all) does on the tasks of a `taskset` (or all)."""
    title("Tasks")
    run_id, taskset = view["run"], view["taskset"]
    with ui.element("div").classes("bar"):
        await _choice(view, "run", f"SELECT DISTINCT {_RUN} FROM groups ORDER BY 1")
        await _choice(view, "taskset", "SELECT DISTINCT taskset FROM tasks ORDER BY 1")
    sql = over_versions_sql(run_id, taskset)
    found = await view.rows(sql, limit=_POINTS * (_CURVES + 1))
    if curves := _curves(found):
        chart("Pass rate over versions of the policy", curves, x="policy version")
    else:
        empty("No rollout has a reward and a version of a policy yet.")
    for name, (where, order) in ORDERS.items():
        heading(name)
        listed = await view.rows(tasks_sql(run_id, taskset, where, order))
        if listed.rows:
            grid(listed, links=_links(listed), widths=_WIDTHS, max_height=300)
        else:
            empty("No task.")
    same_as(sql=tasks_sql(run_id, taskset, *ORDERS["Hardest"]))


def _curves(found: Rows) -> dict[str, list[tuple[Any, Any]]]:
    """Return the longest curves by taskset, and by run where there are several."""
    runs = {row[0] for row in found.rows}
    curves: dict[str, list[tuple[Any, Any]]] = {}
    for run_id, is_eval, taskset, version, rate in found.rows:
        name = f"{taskset}, evaluated" if is_eval else str(taskset)
        name = name if len(runs) == 1 else f"{run_id or 'no run'}: {name}"
        curves.setdefault(name, []).append((version, rate))
    return dict(sorted(curves.items(), key=lambda item: -len(item[1]))[:_CURVES])


_WIDTHS = {
    "task_id": 150,
    "run_id": 130,
    "taskset": 130,
    "groups": 80,
    "pass_rate": 95,
    "newest": 85,
}
_WIDTHS |= {"best_before": 110, "solved_at": 95}


def _links(found: Rows) -> list[str | None]:
    return [
        address("/rollouts", where=f"task_id = {literal(str(task_id))} AND {_of_run(run_id)}")
        for task_id, run_id, *_ in found.rows
    ]


def _of_run(run_id: str | None) -> str:
    if run_id is None:
        return "run_id IS NULL"
    return f"(run_id = {literal(run_id)} OR starts_with(run_id, {literal(run_id + _EVAL)}))"


async def _choice(view: View, name: str, sql: str) -> None:
    """Offer the values of a parameter; the empty one means all."""
    found = await view.rows(sql)
    values = {"": f"all {name}s"} | {str(row[0]): str(row[0]) for row in found.rows if row[0]}
    values.setdefault(view[name], view[name])
    made = ui.select(
        values, value=view[name], label=name, on_change=lambda event: view.go(**{name: event.value})
    )
    made.props("outlined dense options-dense").style("min-width: 200px")
