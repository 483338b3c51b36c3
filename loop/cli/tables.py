"""Print records and tables: they fit the screen, long text is cut, NULL is shown as NULL."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...store.errors import counted as counted

PIPED_WIDTH = 160
"""Columns of output that goes to a file or pipe."""
_CELL = 200
_CUT, _LONG = 400, 4000
_NARROWEST = 14
_NAME = 32
"""Columns that a row's name has at least, where it is as long."""
_GAP = 2


def screen(*, stderr: bool = False) -> Console:
    """Return the console: as wide as the terminal, or PIPED_WIDTH without one."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in console._environ:  # pyright: ignore[reportPrivateUsage]
        # rich takes 80 columns without a terminal, which cuts most tables
        console.width = PIPED_WIDTH
    return console


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows as a table, or one under the other when the columns do not fit side by side."""
    console = screen()
    longest = _LONG if len(rows) == 1 else _CELL
    cells = [[_cell(value, longest) for value in row] for row in rows]
    widths = [
        max([len(name), *(row[place].cell_len for row in cells)])
        for place, name in enumerate(columns)
    ]
    room = console.width - _GAP * len(columns)
    first = min(widths[0], _NAME if columns[1:] else room)  # what a row is called is not cut
    widest = _widest(widths[1:], room - first)
    is_cut = first < widths[0] or widest < max(widths[1:], default=0)
    if widest < _NARROWEST or (len(rows) == 1 and is_cut):
        for i, row in enumerate(rows):
            console.print(Text(f"row {i + 1}", style="bold"))
            print_fields(
                dict(zip(columns, row, strict=True)), indent=2, size=_CUT if rows[1:] else _LONG
            )
        return
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for place, name in enumerate(columns):
        table.add_column(
            Text(name),
            justify="right" if any(_is_number(row[place]) for row in rows) else "left",
            width=min(widths[place], widest if place else max(first, widest)),
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in cells:
        table.add_row(*row)
    console.print(table)


def _widest(widths: Sequence[int], room: int) -> int:
    """Return how wide columns may be so that all fit: only the widest are cut.

    >>> _widest([5, 90, 10], 60)
    45
    """
    left = len(widths)
    for width in sorted(widths):
        if width * left > room:
            return room // left
        room, left = room - width, left - 1
    return max(widths, default=_NARROWEST) + _NARROWEST


def print_fields(fields: Mapping[str, Any], *, indent: int = 0, size: int = _LONG) -> None:
    """Print names and values, one under the other; text longer than `size` is cut."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        table.add_row(Text(name), _cell(value, size, lines=True))
    screen().print(Padding(table, (0, 0, 0, indent)))


def render(
    record: Mapping[str, Any],
    shown: str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    as_json: bool,
) -> None:
    """Print what a command did: with `--json` the record as one object, else what is `shown`.

    A text is printed as it is, a mapping as fields, a list of mappings as a table; without
    `shown`, the record's fields.
    """
    if as_json:
        print_json(record)
    elif isinstance(shown, str):
        print(shown)
    elif shown is None or isinstance(shown, Mapping):
        print_fields(record if shown is None else shown)
    else:
        print_rows(list(shown[0]), [list(row.values()) for row in shown])


def print_heading(text: str) -> None:
    """Print a heading above a table."""
    screen().print(Text(f"\n{text}", style="bold"))


def document(function: Callable[..., Any]) -> str:
    """Return the docstring of a function, without its indentation."""
    import inspect

    return inspect.getdoc(function) or ""


def parameters_of(function: Callable[..., Any], *, skip: int = 0) -> dict[str, str]:
    """Return the parameters after the first `skip`, each with its type and default.

    >>> parameters_of(parameters_of, skip=1)
    {'skip': 'int = 0'}
    """
    import inspect
    import re

    found = [*inspect.signature(function).parameters.values()][skip:]
    # checks print as pages of `FieldInfo`, or as addresses; the descriptions say them in words
    checks = re.compile(r"(?:typing\.)?Annotated\[([\w\[\], |]+?), (?:Field.*?\]\)|After.*?>\))\]")
    kinds = {p.name: checks.sub(r"\1", str(p).partition(": ")[2]) for p in found}
    return {name: checks.sub(r"\1", kind) for name, kind in kinds.items()}  # one within another


def print_document(title: str, text: str, sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a title, a text, and each section of names and values that is not empty."""
    screen().print(title, style="bold", markup=False)
    screen().print(f"\n{text}", markup=False)
    for heading, fields in sections.items():
        if fields:
            print_heading(heading)
            print_fields(fields, indent=2)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on one line."""
    from ...store.raw_json import json_line

    print(json_line(value))


def number(value: float | None) -> str:
    """Return a number with four digits, or NULL.

    >>> number(0.123456), number(None)
    ('0.1235', 'NULL')
    """
    return "NULL" if value is None else f"{value:.4g}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any, size: int, *, lines: bool = False) -> Text:
    if value is None:
        return Text("NULL", style="dim")
    if isinstance(value, float):
        return Text(f"{value:.6g}")
    if isinstance(value, datetime):
        return Text(value.isoformat(sep=" ", timespec="seconds").removesuffix("+00:00"))
    text = value if isinstance(value, str) else _nested(value)
    if not lines:
        text = " ".join(text.split())
    return Text(text if len(text) <= size else f"{text[: size - 1]}…")


def _nested(value: Any) -> str:
    """Return a short form of lists and structs; long lists are cut."""
    if isinstance(value, list) and len(value) > 16:
        shown: Iterable[Any] = value[:12]
        return f"[{', '.join(map(str, shown))}, … {len(value)} values]"
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
