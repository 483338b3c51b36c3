"""Pipelines: what each run read, dropped and made; and an operator tried on a hundred rows."""

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import yaml
from nicegui import ui

from ....operators.apply import Applied
from ....operators.invariants import id_column
from ....operators.resolve import public, resolve
from ....store import Store
from ....store.errors import ConfigError
from ....store.query import literal
from ..frame import View, address, page
from ..graph import Box, graph
from ..queries import Rows
from ..widgets import empty, facts, grid, heading, number, records, same_as, text, title

_RUNS = """SELECT lineage_id, pipeline, source, sink, rows_in, rows_out, rows_dropped,
       rows_failed, list_sum([c.seconds FOR c IN costs]) AS seconds, created_at
FROM lineage ORDER BY created_at DESC LIMIT 500"""
_DROPS = """SELECT operator, reason, count(*) AS rows FROM drops WHERE lineage_id = {}
GROUP BY ALL ORDER BY rows DESC LIMIT 200"""
_TEXT = 300
_SAMPLES = {
    "Dropped rows, for example": """SELECT d.operator, d.reason, e.experience_id, e.reward,
       left(e.response_text, {n}) AS response FROM drops d JOIN experiences e USING (experience_id)
       WHERE d.lineage_id = {id}""",
    "Rows that it stored, before and after": """SELECT e.experience_id,
       left(p.response_text, {n}) AS before, left(e.response_text, {n}) AS after,
       p.reward AS reward_before, e.reward AS reward_after
       FROM experiences e LEFT JOIN experiences p ON p.experience_id = e.parent_id
       WHERE e.lineage_id = {id}""",
    "Values that it derived": """SELECT v.name, left(e.response_text, {n}) AS response,
       v.value, left(v.text, {n}) AS text, v.experience_id FROM experience_values v
       JOIN experiences e USING (experience_id) WHERE v.lineage_id = {id}""",
    "Pairs that it made": """SELECT p.margin, left(c.response_text, {n}) AS chosen,
       left(r.response_text, {n}) AS rejected, p.chosen_id AS experience_id
       FROM preferences p JOIN experiences c ON c.experience_id = p.chosen_id
       JOIN experiences r ON r.experience_id = p.rejected_id WHERE p.lineage_id = {id}""",
}
"""Samples of what a run did, by their headings."""
_PREVIEWED = 100
"""Rows on which an operator is tried."""
_SELECT = "SELECT * FROM experiences"


@page("/pipelines", "Pipelines", section="Data", order=2)
async def show(view: View) -> None:
    """List pipeline runs, show the run `id`, and try `operator` with `params` on rows of `q`."""
    title("Pipelines")
    if view["id"]:
        await _run(view, view["id"])
        return
    found = await view.rows(_RUNS)
    if found.rows:
        links = [view.address(id=row[0]) for row in found.rows]
        shown = records(found.records(), *found.columns[1:])
        grid(shown, links=links, widths={"created_at": 160, "seconds": 90, "rows_failed": 100})
    else:
        empty("No pipeline has run yet: `rlake pipeline run FILE` runs one.")
    with ui.element("div").classes("card"):
        heading(f"Try an operator on {_PREVIEWED} rows; nothing is written")
        _form(view)
    same_as(sql=_RUNS, command="rlake operators\nrlake pipeline explain FILE")


async def _run(view: View, lineage_id: str) -> None:
    """Show one run: its operators as a graph, why it dropped rows, and samples of what it did."""
    key = literal(lineage_id)
    one = await view.one(
        f"SELECT * FROM lineage WHERE lineage_id = {key}",
        absent=f"no pipeline run `{lineage_id}` in this store; the page lists them",
    )
    drops = await view.rows(_DROPS.format(key))
    ui.label(f"{one['pipeline']}, {one['created_at']:%Y-%m-%d %H:%M}, {lineage_id}").classes("soft")
    with ui.element("div").classes("card"):
        graph(*_operators(one, drops))
    with ui.element("div").classes("card"):
        heading("Operators and their cost")
        # by place: two operators may have one name
        costs = [*(one["costs"] or ()), *({} for _ in one["operators"])]
        rows = [
            {
                "operator": op["name"],
                "parameters": op["params"],
                "rows in": op["rows_in"],
                "rows out": op["rows_out"],
                "cached": cost.get("cached"),
                "seconds": cost.get("seconds"),
            }
            for op, cost in zip(one["operators"], costs, strict=False)
        ]
        if rows:
            numbers = dict.fromkeys(("rows in", "rows out", "cached", "seconds"), 100)
            grid(records(rows), widths={"operator": 180, **numbers})
        facts({"rows failed": one["rows_failed"], "digest": one["pipeline_digest"]})
    if drops.rows:
        with ui.element("div").classes("card"):
            heading("Why rows were dropped")
            grid(drops, widths={"operator": 180, "rows": 100}, max_height=300)
    for name, sql in _SAMPLES.items():
        sample = await view.rows(f"{sql.format(id=key, n=_TEXT)} LIMIT 10")
        if sample.rows:
            place = sample.columns.index("experience_id")
            with ui.element("div").classes("card"):
                heading(name)
                links = [address("/rollout", id=str(row[place])) for row in sample.rows]
                grid(sample, links=links, widths={"reward": 90, "margin": 90})
    with ui.expansion("The operators as YAML").props("dense"):
        text("pre", _yaml([{op["name"]: json.loads(op["params"])} for op in one["operators"]]))
    same_as(
        sql=f"SELECT * FROM lineage WHERE lineage_id = {key}", command="rlake pipeline explain FILE"
    )


def _operators(one: Mapping[str, Any], drops: Rows) -> tuple[dict[str, Box], list[tuple[str, str]]]:
    """Return the boxes of a run, from the source to the sink, and what fell out on the way."""
    made = {"source": Box(0, one["source"], f"{number(one['rows_in'])} rows read", None, "rows")}
    lines, last = [], "source"
    names = [op["name"] for op in one["operators"]]
    for i, op in enumerate(one["operators"], 1):
        text_ = f"{number(op['rows_in'])} in, {number(op['rows_out'])} out"
        made[f"op {i}"] = Box(i, op["name"], text_, None, "function")
        lines.append((last, f"op {i}"))
        last = f"op {i}"
        lost = sum(row[2] for row in drops.rows if row[0] == op["name"])
        if names.count(op["name"]) > 1:  # the rows that were dropped do not say by which of them
            lost = min(lost, max(0, op["rows_in"] - op["rows_out"]))
        if lost:
            sql = f"SELECT * FROM drops WHERE lineage_id = {literal(one['lineage_id'])} "
            link = address("/sql", q=f"{sql}AND operator = {literal(op['name'])}")
            made[f"lost {i}"] = Box(
                i + 1, f"{number(lost)} dropped", f"by {op['name']}", link, "lost"
            )
            lines.append((f"op {i}", f"lost {i}"))
    end = len(one["operators"]) + 1
    written = f"{number(one['rows_out'])} rows written"
    made["sink"] = Box(end, one["sink"], written, None, "kept")
    return made, [*lines, (last, "sink")]


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100).rstrip()


def _form(view: View) -> None:
    known = sorted(public())
    with ui.element("div").classes("bar"):
        name = ui.select(known, label="Operator", with_input=True).style("width: 240px")
        name.value = view["operator"] if view["operator"] in known else "keep"
        params = ui.input("Parameters, as YAML", value=view["params"] or "where: reward > 0")
        query = ui.input("Rows", value=view["q"] or _SELECT)
        for field in (name, params.classes("fill"), query.classes("fill")):
            field.props("outlined dense")
        run = ui.button("Preview").props("outline")
    about = ui.label().classes("soft")
    result = ui.element("div").style("display: contents")

    def describe() -> None:
        function = public()[name.value]
        said = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
        about.set_text(f"{function.kind}: {said}")
        params.set_value("where: reward > 0" if name.value == "keep" else "")

    async def tried() -> None:
        spec = {name.value: _parameters(params.value)}
        await _preview(view, spec, query.value or _SELECT)

    def preview() -> None:
        view.remember(operator=name.value, params=params.value, q=query.value)
        view.draw(result, tried)

    name.on_value_change(describe)
    if view.studio.can_write:
        run.on_click(preview)
    else:  # operators may run code, and ask other servers
        run.disable()
        ui.label("The studio must be started with `--write` for it.").classes("soft")


def _parameters(given: str | None) -> dict[str, Any]:
    """Return parameters written as YAML, with or without braces."""
    written = (given or "").strip()
    for form in (written, f"{{{written}}}"):
        try:
            found = yaml.safe_load(form)
        except yaml.YAMLError:
            continue
        if found is None:
            return {}
        if isinstance(found, dict):
            return {str(key): value for key, value in found.items()}
    raise ConfigError(f"parameters are YAML such as `min_std: 0.1, seed: 3`, got {written!r}")


async def _preview(view: View, spec: Mapping[str, Any], query: str) -> None:
    before, applied = await view.call(_applied, view.store, spec, query)
    lost = f"{number(applied.dropped.height)} dropped, {number(applied.failed.height)} failed"
    ui.label(f"{number(before.height)} rows in, {number(applied.rows.height)} out, {lost}")
    grid(_changes(before, applied.rows), max_height=300)
    for what, rows in (("dropped", applied.dropped), ("failed", applied.failed)):
        if rows.height:
            heading(f"Rows that were {what}")
            grid(records(rows.to_dicts()), max_height=220)
    heading("The pipeline, to copy")
    made = {"name": "new", "source": {"sql": query}, "operators": [dict(spec)]}
    text("pre", _yaml(made))


def _applied(store: Store, spec: Mapping[str, Any], query: str) -> tuple[pl.DataFrame, Applied]:
    """Apply an operator to the first rows of a SELECT."""
    rows = store.sql(f"SELECT * FROM ({query.strip().rstrip(';')}\n) LIMIT {_PREVIEWED}").pl()
    return rows, resolve(spec).apply(rows)


def _changes(before: pl.DataFrame, after: pl.DataFrame) -> Rows:
    """Return what an operator did to rows: the columns that it changed, before and after."""
    key = id_column(before.columns)
    if key not in after.columns:
        return records(after.head(_PREVIEWED).to_dicts())
    old = {row[key]: row for row in before.to_dicts()}
    rows = [(old.get(row[key], {}), row) for row in after.head(_PREVIEWED).to_dicts()]
    changed = [n for n in after.columns if any(o.get(n) != row[n] for o, row in rows)]
    shown = [name for name in changed if name != key][:4] or _light(after.columns)
    made = [
        {key: row[key]}
        | (
            {f"{name}, {side}": of.get(name) for name in shown for side, of in _sides(o, row)}
            if changed
            else {name: row[name] for name in shown}
        )
        for o, row in rows
    ]
    return records(made)


def _sides(old: Mapping[str, Any], new: Mapping[str, Any]) -> Sequence[tuple[str, Any]]:
    return (("before", old), ("after", new))


def _light(names: Sequence[str]) -> list[str]:
    wanted = ("reward", "prompt_text", "response_text", "answer", "margin")
    return [name for name in names if name in wanted] or list(names[:4])
