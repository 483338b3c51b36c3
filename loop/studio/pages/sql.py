"""SQL: an editor that knows our tables, results as a grid or a chart, the plan, saved queries."""

import json
import shlex
from functools import partial
from time import monotonic
from typing import Any

from nicegui import ui

from ....store.query import view_names
from ....store.schema import TABLES
from ..frame import View, address, page
from ..queries import Rows
from ..widgets import Series, cell, chart, empty, grid, number, same_as, text, title

SECONDS = 60.0
"""Time of a query, in seconds."""
_LIMIT = 2000
EXAMPLES = {
    "Newest rollouts": "SELECT experience_id, reward, response_text FROM experiences\n"
    "ORDER BY created_at DESC LIMIT 50",
    "Reward over batches": "SELECT batch, avg(reward) AS reward, count(*) AS rows\n"
    "FROM experiences GROUP BY batch ORDER BY batch",
    "What steps were trained on": "SELECT run_id, step, num_rows, reward_mean, lag_max\n"
    "FROM steps ORDER BY run_id, step",
    "Hardest tasks": "SELECT task_id, num_rollouts, pass_rate FROM task_pass_rates\n"
    "WHERE num_scored >= 4 ORDER BY pass_rate, num_rollouts DESC LIMIT 50",
    "Why rows were dropped": "SELECT operator, reason, count(*) AS rows\n"
    "FROM drops GROUP BY ALL ORDER BY rows DESC",
    "Tools and their errors": "SELECT name, count(*) AS calls, avg(is_error::INT) AS errors\n"
    "FROM tool_calls GROUP BY name ORDER BY calls DESC",
}
_COMPLETE = """(async () => {
  const CM = await import("nicegui-codemirror");
  const editor = await getElement(ID).editorPromise;
  const options = WORDS;
  const autocomplete = context => {
    const word = context.matchBefore(/\\w+/);
    return word && {from: word.from, options, validFor: /^\\w*$/};
  };
  // one function: the editor forgets the answer of a source that is another at each key
  editor.dispatch({effects: CM.StateEffect.appendConfig.of(
    CM.EditorState.languageData.of(() => [{autocomplete}]))});
})()"""
_SAVED = "rlake-queries"


@page("/sql", "SQL", section="Rows", order=2)
async def show(view: View) -> None:
    """Run the query `q`; show it as `as=chart`, or its plan with `as=plan`."""
    title("SQL")
    editor = ui.codemirror(
        view["q"] or next(iter(EXAMPLES.values())), language="PostgreSQL", line_wrapping=True
    )
    theme = "body.body--dark"
    ui.run_javascript(_COMPLETE.replace("ID", str(editor.id), 1).replace("WORDS", _words(), 1))
    ui.run_javascript(
        f"if (document.querySelector('{theme}')) getElement({editor.id}).setTheme('githubDark')"
    )

    def run(how: str) -> None:
        view.remember(q=editor.value, **{"as": how if how != "grid" else None})
        view.draw(result, partial(_result, view, editor.value, how))

    with ui.element("div").classes("bar"):
        ui.button("Run", on_click=lambda: run("grid")).props("unelevated").tooltip("Ctrl-Enter")
        ui.button("Chart", on_click=lambda: run("chart")).props("outline")
        ui.button("Explain", on_click=lambda: run("plan")).props("outline")
        ui.element("div").classes("fill")
        with ui.button("Examples").props("flat"), ui.menu():
            for name, query in EXAMPLES.items():
                ui.menu_item(name, on_click=partial(_put, editor, query))
        await _saved(view, editor)
    editor.map_key("Mod-Enter", lambda: run("grid"))
    result = ui.element("div")
    if view["q"]:
        run(view["as"] or "grid")


async def _result(view: View, query: str, how: str) -> None:
    began = monotonic()
    asked = f"EXPLAIN {query}" if how == "plan" else query
    found = await view.rows(asked, limit=_LIMIT, seconds=SECONDS, pool="console")
    first = "the first " if found.is_cut else ""
    note = f"{first}{number(len(found.rows))} rows in {monotonic() - began:.2f} s"
    ui.label(note).classes("soft")
    if how == "plan":
        text("pre", "\n".join(str(row[-1]) for row in found.rows))
    elif not found.rows:
        empty("No row matches.")
    elif how == "chart":
        _chart(found)
    else:
        grid(found, links=_links(found), max_height=640)
    same_as(command=f"rlake sql {shlex.quote(query)}")


def _links(found: Rows) -> list[str | None] | None:
    """Return the pages of rollouts and runs that rows name."""
    for name, path in (("experience_id", "/rollout"), ("run_id", "/run")):
        if name in found.columns:
            place = found.columns.index(name)
            return [address(path, id=row[place]) if row[place] else None for row in found.rows]
    return None


def _chart(found: Rows) -> None:
    """Draw the columns of numbers over the first column; text columns between part the curves."""
    is_number = [
        any(isinstance(row[i], int | float) and not isinstance(row[i], bool) for row in found.rows)
        for i in range(len(found.columns))
    ]
    drawn = [i for i, numbers in enumerate(is_number) if numbers and i > 0]
    if not drawn:
        empty("A chart needs a column of numbers after its first column.")
        return
    apart = [i for i, numbers in enumerate(is_number) if not numbers and i > 0]
    series: dict[str, list[tuple[Any, Any]]] = {}
    for row in found.rows:
        if row[0] is None:  # has no place on the axis
            continue
        label = " ".join(str(cell(row[i])) for i in apart)
        for i in drawn:
            own = found.columns[i] if len(drawn) > 1 or not label else ""
            name = " ".join(filter(None, (label, own)))
            across = row[0] if isinstance(row[0], int | float) else str(cell(row[0]))
            series.setdefault(name, []).append((across, row[i]))
    if not any(isinstance(x, str) for points in series.values() for x, _ in points):
        series = {name: sorted(points, key=lambda p: p[0]) for name, points in series.items()}
    shown: Series = dict(list(series.items())[:20])
    made = chart(found.columns[0], shown, x=found.columns[0])
    if made.parent_slot is not None:
        made.parent_slot.parent.classes("tall")


def _put(editor: ui.codemirror, query: str) -> None:
    editor.set_value(query)


def _words() -> str:
    """Return what the editor completes, as JSON: tables, views and columns with what they mean."""
    words = {n: {"label": n, "type": "class", "detail": one.row} for n, one in TABLES.items()}
    words |= {name: {"label": name, "type": "class", "detail": "view"} for name in view_names()}
    for one in TABLES.values():
        for column in one.columns:
            words.setdefault(
                column.name, {"label": column.name, "type": "property", "detail": column.note}
            )
    return json.dumps(list(words.values()))


async def _saved(view: View, editor: ui.codemirror) -> None:
    """Let people keep queries in their browser: the store is only read."""

    async def known() -> dict[str, str]:
        found = await ui.run_javascript(f"return localStorage.getItem('{_SAVED}')", timeout=5)
        try:
            kept = json.loads(found or "{}")
        except ValueError:
            return {}
        return {str(k): str(v) for k, v in kept.items()} if isinstance(kept, dict) else {}

    async def save() -> None:
        name = (field.value or "").strip()
        if not name:
            ui.notify("Name the query first")
            return
        kept = json.dumps(await known() | {name: editor.value})
        await ui.run_javascript(f"localStorage.setItem('{_SAVED}', {json.dumps(kept)})", timeout=5)
        ui.notify(f"Saved in this browser as {name}")
        menu.close()

    async def fill() -> None:
        names.clear()
        with names:
            for name, query in (await known()).items():
                ui.menu_item(name, on_click=partial(_put, editor, query))

    with ui.button("Saved", on_click=fill).props("flat"), ui.menu() as menu:
        names = ui.element("div")
        with ui.element("div").style("padding: 10px 14px; min-width: 260px"):
            field = ui.input("Save this query as").props("dense")
            ui.button("Save", on_click=save).props("flat dense")
