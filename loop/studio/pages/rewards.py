"""Rewards diff: what changes when another reward replaces the one of the same rows."""

import shlex
from functools import partial

from nicegui import ui

from ....pipelines.reward_diff import changed_rows, compare
from ..frame import View, address, page
from ..widgets import empty, facts, grid, heading, records, same_as, text, title

_SCORES = """SELECT DISTINCT 'score:' || scorer || '@' || scorer_version AS reward FROM scores
ORDER BY reward LIMIT 200"""
_SHOWN = 50


@page("/rewards", "Rewards diff", section="Rows", order=5)
async def show(view: View) -> None:
    """Compare the rewards `a` and `b` of the rows that match `where`."""
    title("Rewards diff")
    known = ["reward", *(str(row[0]) for row in (await view.rows(_SCORES)).rows)]
    a, b = view["a"] or "reward", view["b"] or known[-1]
    with ui.element("div").classes("bar"):
        names = [
            ui.select(list(dict.fromkeys([value, *known])), value=value, label=label)
            for value, label in ((a, "Reward"), (b, "Compared with"))
        ]
        for one in names:
            one.props("outlined dense").style("width: 240px")
        where = ui.input("SQL condition", value=view["where"]).props("outlined dense")

        def ask() -> None:
            view.go(a=names[0].value, b=names[1].value, where=where.value)

        where.classes("fill").on("keydown.enter", ask)
        ui.button("Compare", on_click=ask).props("outline")
    condition = view["where"] or None
    command = f"rlake rewards diff {shlex.quote(a)} {shlex.quote(b)}"
    if condition:
        command += f" --where {shlex.quote(condition)}"
    if a == b:
        empty("No second reward to compare with yet: `rlake rescore` computes one.")
    else:
        await _compared(view, a, b, condition)
    same_as(sql="SELECT * FROM scores", command=command)


async def _compared(view: View, a: str, b: str, where: str | None) -> None:
    found = await view.call(partial(compare, view.store, a, b, where=where))
    with ui.element("div").classes("two"):
        with ui.element("div").classes("card"):
            heading(f"Rows: {a} is a, {b} is b")
            facts({name.replace("_", " "): value for name, value in found.rows.items()})
        with ui.element("div").classes("card"):
            heading("Groups")
            facts({name.replace("_", " "): value for name, value in found.groups.items()})
    with ui.element("div").classes("two"):
        with ui.element("div").classes("card"):
            heading("Rows by both values")
            grid(records(found.confusion), max_height=300)
        with ui.element("div").classes("card"):
            heading("Tasks whose mean changes most")
            if found.tasks:
                grid(records(found.tasks), max_height=300)
            else:
                text("div", "None changes.", "soft")
    rows = await view.call(partial(changed_rows, view.store, a, b, where=where, limit=_SHOWN))
    with ui.element("div").classes("card"):
        heading("Rows that change most")
        if rows.height:
            links = [address("/rollout", id=one) for one in rows["experience_id"]]
            names = ("experience_id", "a", "b", "prompt_text", "response_text")
            grid(records(rows.to_dicts(), *names), links=links, widths={"a": 80, "b": 80})
        else:
            text("div", "No row changes.", "soft")
