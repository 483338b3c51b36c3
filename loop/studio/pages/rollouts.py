"""A grid over the rollouts that match an SQL condition, and what they consist of."""

import json
from collections.abc import Mapping
from typing import Any

from nicegui import ui

from ....store.errors import QueryError
from ....store.query import is_in, literal
from ....store.schema import TABLES
from ..frame import Studio, View, address, answers, page
from ..queries import Rows
from ..widgets import column, grid_options, grid_rows, heading, number, same_as, text, title

ROWS = "/rollouts/rows"
LIGHT = (
    "experience_id",
    "reward",
    "policy_version",
    "num_tokens",
    "num_turns",
    "finish_reason",
    "drop_reason",
    "source",
    "run_id",
    "batch",
    "created_at",
)
"""Columns that are sorted by: small ones, so that 200,000 rows take a moment."""
_TEXTS = ("prompt_text", "response_text")
_TEXT_CHARACTERS = 200
_NUMBERS = ("reward", "policy_version", "num_tokens", "num_turns", "batch")
_BLOCK, _MOST = 100, 500
_FACETS = ("finish_reason", "policy_version", "source", "purpose", "run_id", "drop_reason")
_VALUES = 8
"""Values of a facet that are listed: the most frequent ones, and of versions the newest."""
_FETCH = """({
  rowCount: undefined,
  getRows: p => {
    const sort = p.sortModel[0] || {};
    const at = new URLSearchParams({where: WHERE, start: p.startRow, end: p.endRow,
                                    sort: sort.colId || "", order: sort.sort || ""});
    fetch("/rollouts/rows?" + at).then(r => r.json()).then(found => {
      if (found.error) { p.failCallback(); return; }
      p.successCallback(found.rows, found.last);
    }).catch(() => p.failCallback());
  },
})"""
"""Where the grid gets its rows from; `WHERE` is replaced by the condition as JSON."""


def page_sql(where: str, sort: str, order: str, start: int, end: int) -> str:
    """Return the SELECT of the light columns of some rows.

    Raises QueryError for a column to sort by that is none of them.
    """
    if sort and sort not in LIGHT:
        raise QueryError(f"`sort` is {sort!r}, expected one of {', '.join(LIGHT)}")
    direction = "DESC" if order == "desc" else "ASC"
    # by the id too, so that rows with equal values keep their places from page to page
    by = (
        f"{sort} {direction} NULLS LAST, experience_id"
        if sort
        else "created_at DESC, experience_id"
    )
    which = f"WHERE ({where}\n) " if where.strip() else ""
    return (
        f"SELECT {', '.join(LIGHT)} FROM experiences {which}ORDER BY {by}, experience_id "
        f"LIMIT {end - start} OFFSET {start}"
    )


@answers(ROWS)
async def rows(studio: Studio, params: Mapping[str, str]) -> dict[str, Any]:
    """Return rows of the grid, and their number where it is known."""
    start = max(0, int(params.get("start") or 0))
    end = min(int(params.get("end") or _BLOCK), start + _MOST)
    name = params.get("sort", "").removeprefix("c")
    sort = LIGHT[int(name)] if name.isdigit() and int(name) < len(LIGHT) else ""
    where = params.get("where", "")
    found = await studio.queries.rows(
        page_sql(where, sort, params.get("order", ""), start, end), limit=_MOST
    )
    ids = [row[0] for row in found.rows]
    texts = {}
    if ids:
        # of these rows only: sorting would carry the texts of all rows along
        cut = ", ".join(f"left({name}, {_TEXT_CHARACTERS})" for name in _TEXTS)
        more = await studio.queries.rows(
            f"SELECT experience_id, {cut} FROM experiences WHERE {is_in('experience_id', ids)}"
        )
        texts = {row[0]: row[1:] for row in more.rows}
    whole = [(*row, *texts.get(row[0], (None, None))) for row in found.rows]
    links = [address("/rollout", id=str(one)) for one in ids]
    last = start + len(ids) if len(ids) < end - start else -1
    return {"rows": grid_rows(whole, links), "last": last}


@page("/rollouts", "Rollouts", section="Rows", order=1)
async def show(view: View) -> None:
    """Show the rollouts that match `where`, by `sort` and `order`."""
    where = view["where"]
    title("Rollouts")
    with ui.element("div").classes("bar"):
        condition = ui.input(
            label="SQL condition", value=where, placeholder="reward < 1 AND num_tokens > 100"
        )
        condition.props("outlined dense clearable").classes("fill")
        condition.on("keydown.enter", lambda: view.go(where=condition.value))
        ui.button("Show", on_click=lambda: view.go(where=condition.value)).props("unelevated")
    which = f"WHERE ({where}\n)" if where.strip() else ""
    [counted] = await view.query(
        "SELECT count(*) AS rows, avg(reward) AS reward, avg(num_tokens) AS tokens "
        f"FROM experiences {which}"
    )
    summary = f"{number(counted['rows'])} rollouts"
    if counted["reward"] is not None:
        summary += f", mean reward {number(counted['reward'])}"
    if counted["tokens"] is not None:
        summary += f", {number(counted['tokens'])} tokens on average"
    ui.label(summary).classes("soft")
    with ui.element("div").classes("with-side"):
        _grid(view, where)
        side = ui.element("div").classes("card")
    same_as(sql=page_sql(where, view["sort"], view["order"], 0, _BLOCK))
    with side:
        await _facets(view, where)


def _grid(view: View, where: str) -> None:
    widths = {"experience_id": 230, "run_id": 140, "created_at": 165}
    columns = []
    for i, name in enumerate((*LIGHT, *_TEXTS)):
        kind = "number" if name in _NUMBERS else "VARCHAR"
        made = column(i, name.removesuffix("_text"), kind, width=widths.get(name, 118))
        if name in _TEXTS:
            made |= {"sortable": False, "width": 320}
        if name == view["sort"]:
            made["initialSort"] = "desc" if view["order"] == "desc" else "asc"
        columns.append(made)
    order = ("experience_id", "reward", *_TEXTS)  # what is read first comes first
    names = (*LIGHT, *_TEXTS)
    columns.sort(key=lambda c: _place(names[int(c["field"][1:])], order, names))
    options = grid_options(
        columns, rowModelType="infinite", cacheBlockSize=_BLOCK, maxBlocksInCache=20
    )
    options[":datasource"] = _FETCH.replace("WHERE", json.dumps(where), 1)
    made = ui.aggrid(options, auto_size_columns=False).classes("links").style("height: 70vh")

    def sorted_by(event: Any) -> None:
        chosen = event.args or {}
        name = str(chosen.get("column") or "").removeprefix("c")
        sort = LIGHT[int(name)] if name.isdigit() and int(name) < len(LIGHT) else None
        view.remember(sort=sort, order=chosen.get("order") if sort else None)

    made.on(
        "sortChanged",
        sorted_by,
        js_handler=f"""() => {{
          const by = getElement({made.id}).api.getColumnState().find(c => c.sort) || {{}};
          emit({{column: by.colId, order: by.sort}});
        }}""",
    )


def _place(name: str, order: tuple[str, ...], names: tuple[str, ...]) -> tuple[int, int]:
    return (order.index(name) if name in order else len(order), names.index(name))


async def _facets(view: View, where: str) -> None:
    which = f"WHERE ({where}\n)" if where.strip() else ""
    by_taskset = (
        f"SELECT taskset AS value, count(*) AS rows FROM (SELECT task_id FROM experiences {which}) "
        "JOIN tasks USING (task_id) GROUP BY 1 ORDER BY rows DESC, 1 "
    )
    found = await view.rows(f"{by_taskset} LIMIT {_VALUES}")
    of_set = "task_id IN (SELECT task_id FROM tasks WHERE taskset = {})"
    _facet(view, where, "taskset", found, lambda value: of_set.format(literal(str(value))))
    for name in _FACETS:
        order = "1 DESC NULLS LAST" if name == "policy_version" else "rows DESC, 1"
        found = await view.rows(
            f"SELECT {name} AS value, count(*) AS rows FROM experiences {which} "
            f"GROUP BY 1 ORDER BY {order} LIMIT {_VALUES}"
        )
        _facet(view, where, name, found, lambda value, name=name: _equals(name, value))
    parts = await view.rows(
        "SELECT part.name AS value, avg(part.value) AS mean FROM "
        f"(SELECT unnest(rewards) AS part FROM experiences {which}) GROUP BY 1 ORDER BY 1"
    )
    part = "list_filter(rewards, lambda r: r.name = {})[1].value < 1"
    _facet(view, where, "reward parts (mean)", parts, lambda v: part.format(literal(str(v))))


def _equals(name: str, value: object) -> str:
    if value is None:
        return f"{name} IS NULL"
    kind = next(c.type for c in TABLES["experiences"].columns if c.name == name)
    return f"{name} = {value if str(kind) == 'int64' else literal(str(value))}"


def _facet(view: View, where: str, name: str, found: Rows, condition: Any) -> None:
    """List the values of a column; a click narrows the condition to one."""
    if len(found.rows) < 2 and not (found.rows and "mean" in name):
        return  # all rows have the same value
    heading(name.replace("_", " "))
    with ui.element("div").classes("facet"):
        for value, count in found.rows:
            one = condition(value)
            narrowed = f"({where}) AND {one}" if where.strip() else one
            with ui.link(target=view.address(where=narrowed)):
                text("span", "none" if value is None else str(value))
                text("span", number(count))
