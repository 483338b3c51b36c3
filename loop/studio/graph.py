"""Graphs of what led to what: boxes in columns, and lines between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nicegui import ui

from ...store.errors import shorten
from .widgets import text

MOST = 12
"""Boxes of a column; what is beyond them is one box."""
_ROW, _SIDE = 62, 0.08
"""Height of a box with the space below it, in pixels; and the space at its sides, in columns."""

_NARROWEST = 150
"""Least width of a column, in pixels; a page that is narrower scrolls."""


@dataclass(frozen=True)
class Box:
    """A box of a graph."""

    column: int
    title: str
    detail: str = ""
    link: str | None = None
    """The address that a click opens."""
    kind: str = ""
    """What its color says: rows, policy, function, kept or lost."""


def graph(boxes: Mapping[str, Box], lines: Sequence[tuple[str, str]]) -> None:
    """Show boxes, by their keys, and lines between them.

    Its texts are those of elements, so that nothing in them is markup.
    """
    columns: dict[int, list[str]] = {}
    for key, box in boxes.items():
        columns.setdefault(box.column, []).append(key)
    height, width = max(map(len, columns.values())), max(columns) + 1
    middle = {
        key: (height - len(keys)) / 2 + i + 0.5
        for keys in columns.values()
        for i, key in enumerate(keys)
    }
    entered = {other for _, other in lines}
    with (
        ui.element("div")
        .classes("graph")
        .style(f"height: {height * _ROW}px; min-width: {width * _NARROWEST}px")
    ):
        with ui.element("svg") as drawing:
            # lengths of columns and rows, whatever the width of the page
            drawing.props.update(
                {"viewBox": f"0 0 {width} {height}", "preserveAspectRatio": "none"}
            )
            for one, other in lines:
                x, y = boxes[one].column + 1 - _SIDE, middle[one]
                x2, y2 = boxes[other].column + _SIDE, middle[other]
                bend = (x2 - x) / 2
                ui.element("path").props["d"] = (
                    f"M{x} {y} C{x + bend} {y} {x2 - bend} {y2} {x2} {y2}"
                )
        for key, box in boxes.items():
            with ui.element("a" if box.link else "div").classes(f"box {box.kind}") as drawn:
                left, wide = (box.column + _SIDE) / width, (1 - 2 * _SIDE) / width
                drawn.style(
                    f"left: {left:.2%}; width: {wide:.2%}; top: {middle[key] * _ROW - 24:.0f}px"
                )
                if box.link:
                    drawn.props["href"] = box.link
                if key in entered:
                    drawn.classes("entered")
                for part in (box.title, box.detail):
                    text("span", shorten(part, 200))


def limited(boxes: Mapping[str, Box], most: int = MOST) -> dict[str, Box]:
    """Return the first boxes of a column, and one that says how many more there are."""
    if len(boxes) <= most:
        return dict(boxes)
    kept = dict(list(boxes.items())[: most - 1])
    column = next(iter(boxes.values())).column
    more = Box(column, f"{len(boxes) - most + 1:,} more", "in the tables below")
    return kept | {f"more of column {column}": more}
