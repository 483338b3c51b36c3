"""What pages are made of: grids, charts, facts, and the SQL or command that gives the same."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from ...store.errors import shorten
from .frame import address
from .queries import Rows

CELL = 300
"""Most characters of a cell."""
_COLORS = ("#4c78d8", "#e08a3c", "#3fa37a", "#c65b8a", "#8a6fd1", "#b0a030", "#4aa5c4", "#d0605e")
"""Colors of curves; they are readable on light and dark ground."""
_GRAY = "#8a8f98"
_NUMBERS = re.compile(r"(U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|DOUBLE|FLOAT|DECIMAL\(.*\)|number)")
_OPEN = """e => {
  const to = e.data && e.data._href;
  if (!to) return;
  if (e.event && (e.event.ctrlKey || e.event.metaKey)) window.open(to, "_blank", "noopener");
  else window.location = to;
}"""


def cell(value: Any) -> str | int | float | bool | None:
    """Return a value as a grid shows it: numbers as they are, all else as text that is cut.

    Nothing else reaches the browser: keys of objects that begin with a colon would be run there.

    >>> cell({":x": [1]}), cell(0.5), cell(float("nan")), cell(b"ab")
    ('{":x": [1]}', 0.5, 'nan', '2 bytes')
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**53 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
    if isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return shorten(str(value), CELL)


def column(index: int, name: str, kind: str = "VARCHAR", **options: Any) -> dict[str, Any]:
    """Return the definition of a grid's column; fields are numbered, whatever a query names them.

    AG Grid would read a name with a dot as a path, and NiceGUI run one that begins with a colon.
    """
    made: dict[str, Any] = {"field": f"c{index}", "headerName": name, "tooltipField": f"c{index}"}
    if _NUMBERS.fullmatch(kind):
        made |= {"type": "rightAligned", "width": 100, ":valueFormatter": _NUMBER}
    return made | options


_NUMBER = """p => typeof p.value !== "number" ? (p.value ?? "")
  : Number.isInteger(p.value) ? String(p.value)
  : Math.abs(p.value) >= 1e-3 && Math.abs(p.value) < 1e6 ? String(+p.value.toFixed(4))
  : p.value.toExponential(3)"""


_TICK = """v => v === 0 || (Math.abs(v) >= 1e-3 && Math.abs(v) < 1e5)
  ? String(+v.toPrecision(6)) : v.toExponential(1)"""


def grid_options(columns: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Return the options that all grids share; a row with an address opens it when clicked."""
    return {
        "columnDefs": columns,
        "defaultColDef": {"resizable": True, "sortable": True, "minWidth": 70},
        "rowHeight": 32,
        "headerHeight": 34,
        "enableCellTextSelection": True,
        "suppressCellFocus": True,
        "animateRows": False,
        "tooltipShowDelay": 600,
        ":onRowClicked": _OPEN,
        **options,
    }


def grid(
    found: Rows,
    *,
    links: Sequence[str | None] | None = None,
    widths: Mapping[str, int] | None = None,
    max_height: int = 420,
) -> ui.aggrid:
    """Show rows; `links` are the addresses that they open."""
    widths = widths or {}
    columns = [
        column(i, name, kind, **({"width": widths[name]} if name in widths else {"flex": 1}))
        for i, (name, kind) in enumerate(zip(found.columns, found.types, strict=True))
    ]
    if len(columns) > 9:  # wider than the page: it scrolls
        columns = [{k: v for k, v in one.items() if k != "flex"} for one in columns]
    rows = grid_rows(found.rows, links)
    made = ui.aggrid(grid_options(columns, rowData=rows), auto_size_columns=False)
    height = min(max_height, 36 + 32 * max(len(rows), 1) + 16)
    return made.style(f"height: {height}px").classes("links" if links else "")


def grid_rows(
    rows: Iterable[Sequence[Any]], links: Sequence[str | None] | None = None
) -> list[dict[str, Any]]:
    """Return rows as a grid of `column`s takes them."""
    made = [{f"c{i}": cell(value) for i, value in enumerate(row)} for row in rows]
    for one, link in zip(made, links or (), strict=False):
        one["_href"] = link
    return made


def records(rows: Sequence[Mapping[str, Any]], *names: str) -> Rows:
    """Return mappings as rows of a grid, with these columns."""
    names = names or tuple(rows[0] if rows else ())
    values = [tuple(row.get(name) for name in names) for row in rows]
    types = [
        "number" if any(isinstance(v, int | float) for v in column_values) else "VARCHAR"
        for column_values in (zip(*values, strict=True) if values else [()] * len(names))
    ]
    return Rows(list(names), types, values, is_cut=False)


Series = Mapping[str, Sequence[tuple[Any, Any]]]
"""Curves by name: points (x, y)."""


def chart_options(series: Series, *, kind: str = "line", x: str = "step") -> dict[str, Any]:
    """Return the options of a chart with these curves; their tooltips are drawn, never HTML."""
    shared = {
        "type": kind,
        "showSymbol": False,
        "symbolSize": 6,
        "lineStyle": {"width": 1.8},
        "connectNulls": True,
        "emphasis": {"disabled": True},
    }
    label, line = {"color": _GRAY}, {"lineStyle": {"color": f"{_GRAY}30"}}
    axis: dict[str, Any] = {"axisLabel": label, "splitLine": line}
    is_text = any(isinstance(px, str) for points in series.values() for px, _ in points)
    drawn = [
        {
            **shared,
            "name": name,
            "z": 30 - i,  # of equal points, a click means the first curve
            "data": [[px, cell(py)] for px, py in points],
            "showSymbol": len(points) < 3 or kind == "scatter",
        }
        for i, (name, points) in enumerate(series.items())
    ]
    across = {"type": "category" if is_text else "value", "name": x, "nameLocation": "middle"}
    return {
        "animation": False,
        "color": list(_COLORS),
        "grid": {"left": 52, "right": 14, "top": 28 if len(series) > 1 else 12, "bottom": 34},
        "legend": {
            "show": len(series) > 1,
            "top": 0,
            "type": "scroll",
            "icon": "roundRect",
            "itemHeight": 3,
            "textStyle": {"color": _GRAY},
        },
        "tooltip": {"trigger": "axis", "renderMode": "richText", "confine": True},
        "xAxis": {
            **axis,
            **across,
            "nameGap": 20,
            "nameTextStyle": {"color": _GRAY},
            "min": None if is_text else "dataMin",
            "max": None if is_text else "dataMax",
            "minInterval": 1,
            "splitLine": {"show": False},
        },
        "yAxis": {
            **axis,
            "axisLabel": label | {":formatter": _TICK},
            "type": "value",
            "scale": True,
            "splitNumber": 4,
        },
        "series": drawn,
    }


def chart(title: str, series: Series, *, kind: str = "line", x: str = "step") -> ui.echart:
    """Show curves under a title."""
    with ui.element("section").classes("chart") as section:
        section.props["data-title"] = title
        heading(title)
        return ui.echart(chart_options(series, kind=kind, x=x))


def title(content: str) -> ui.label:
    """Show the title of a page."""
    return ui.label(content).classes("title").props("role=heading aria-level=1")


def empty(content: str) -> ui.label:
    """Say that there is nothing to show."""
    return ui.label(content).classes("empty")


def heading(text: str) -> ui.label:
    """Show the heading of a part of a page."""
    return ui.label(text).classes("heading").props("role=heading aria-level=2")


def facts(values: Mapping[str, Any]) -> None:
    """Show names and values side by side; None is left out."""
    with ui.element("dl"):
        for name, value in values.items():
            if value is not None:
                with ui.element("div"):
                    text("dt", name)
                    text("dd", value if isinstance(value, str) else number(value))


def number(value: Any) -> str:
    """Return a number as people read it.

    >>> number(1234567), number(0.123456), number(None)
    ('1,234,567', '0.1235', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if value else "0"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def text(tag: str, content: str, classes: str = "") -> TextElement:
    """Show a text in an element of HTML; whatever it holds, it is shown and never read as HTML."""
    return TextElement(tag=tag, text=content).classes(classes)


def status(name: str) -> ui.label:
    """Show the status of a job as a colored word."""
    return ui.label(name).classes(f"status {name.split()[0]}")


def same_as(**ways: str) -> None:
    """Show the SQL or the command that gives the same, for use elsewhere."""
    with ui.expansion("The same as SQL or a command").classes("same").props("dense"):
        for name, content in ways.items():
            with ui.element("div").classes("way"):
                if name == "sql":
                    ui.link("open in SQL", address("/sql", q=content))
                text("pre", content)
