"""Curriculum: which tasks a run chose, what it expected of them, and what they turned out to be."""

from nicegui import ui

from ....store.query import literal
from ..frame import View, address, page
from ..widgets import chart, empty, grid, number, same_as, title

_RUNS = "SELECT DISTINCT run_id FROM task_selections ORDER BY run_id"
_TASKS = """
WITH chosen AS (
    SELECT task_id, count(*) AS times, max(batch) AS last_batch,
           arg_max(expected, batch) AS expected
    FROM task_selections WHERE run_id = {run} GROUP BY task_id),
believed AS (
    SELECT task_id, arg_max(alpha / (alpha + beta), batch) AS believed,
           arg_max(pass_rate, batch) FILTER (pass_rate IS NOT NULL) AS last_observed
    FROM task_estimates WHERE run_id = {run} GROUP BY task_id)
SELECT task_id, left(t.prompt_text, 120) AS prompt, times, last_batch, expected, believed,
       last_observed
FROM chosen LEFT JOIN believed USING (task_id) LEFT JOIN tasks t USING (task_id)
ORDER BY times DESC, task_id LIMIT 1000""".strip()
_BATCHES = """
SELECT batch, avg(s.expected) AS expected, avg(e.pass_rate) AS observed,
       avg(e.alpha / (e.alpha + e.beta)) AS believed, count(DISTINCT s.task_id) AS tasks
FROM task_selections s LEFT JOIN task_estimates e USING (run_id, attempt, batch, task_id)
WHERE s.run_id = {run} GROUP BY batch ORDER BY batch""".strip()
_MOST = 400
"""Batches of the chart, the last ones."""


@page("/curriculum", "Curriculum", section="Rows", order=4)
async def show(view: View) -> None:
    """Show what `run` chose and believed, by batches and by tasks."""
    title("Curriculum")
    runs = [str(row[0]) for row in (await view.rows(_RUNS)).rows]
    if not runs:
        empty("No run has chosen tasks by a selector yet: set `tasks.selector`.")
        same_as(sql="SELECT * FROM task_selections")
        return
    run_id = view["run"] or runs[-1]
    chooser = ui.select(list(dict.fromkeys([run_id, *runs])), value=run_id, label="Run")
    chooser.on_value_change(lambda event: view.go(run=event.value))
    chooser.props("outlined dense").style("width: 340px")
    key = literal(run_id)
    batches = (await view.query(_BATCHES.format(run=key), limit=100_000))[-_MOST:]
    if not batches:
        empty("This run has chosen no task.")
    rates: dict[str, list[tuple[int, float]]] = {}
    for name in ("expected", "observed", "believed"):
        points = [(one["batch"], one[name]) for one in batches if one[name] is not None]
        rates |= {name: points} if points else {}
    with ui.element("div").classes("charts"):
        if rates:  # a selector that only goes through the tasks expects nothing of them
            chart("Pass rate of the chosen tasks", rates, x="batch")
        if batches:
            counts = [(one["batch"], one["tasks"]) for one in batches]
            chart("Different tasks in a batch", {"tasks": counts}, x="batch")
    sql = _TASKS.format(run=key)
    found = await view.rows(sql)
    shown = f"{number(len(found.rows))} tasks; a click opens the rollouts of one"
    ui.label(shown).classes("soft")
    where = [f"run_id = {key} AND task_id = {literal(row[0])}" for row in found.rows]
    links = [address("/rollouts", where=one) for one in where]
    grid(found, links=links, widths={"times": 80, "last_batch": 100}, max_height=640)
    same_as(sql=sql)
