"""The command that tells which algorithms there are, and all about one."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import JOBS, JsonOption, app
from .lazy import heavy
from .tables import print_fields, print_heading, print_json, print_rows, screen

if TYPE_CHECKING:
    from .algorithm_docs import Description


@app.command(rich_help_panel=JOBS)
def algorithms(
    name: Annotated[
        str | None, typer.Argument(help="One of them, or package.module:Class; all when left out.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the algorithms, or tell one's paper, parameters and metrics."""
    describe = heavy("cli.algorithm_docs").describe
    if name is not None:
        _tell(describe(name), as_json=as_json)
        return
    found = [describe(one) for one in heavy("algorithms").names()]
    if as_json:
        print_json({"algorithms": [_plain(one) for one in found]})
        return
    columns = ("algorithm", "what it is", "draws", "needs", "arXiv")
    print_rows(columns, [_row(one) for one in found])


def _row(one: "Description") -> tuple[str, ...]:
    draws = one.unit if one.group_size in (1, None) else f"{one.unit} of {one.group_size}"
    return one.name, one.summary.rstrip("."), draws, ", ".join(one.needs), one.paper or ""


def _tell(one: "Description", *, as_json: bool) -> None:
    if as_json:
        print_json(_plain(one))
        return
    screen().print(one.title, style="bold", markup=False)
    screen().print(f"\n{one.text}", markup=False)
    print_heading("draws and needs")
    print_fields(
        {"draws": _row(one)[2], "needs": ", ".join(one.needs) or "tokens and weights only"},
        indent=2,
    )
    print_heading("parameters")
    print_fields({f"{p.name}: {_yaml(p.default)}": p.meaning for p in one.parameters}, indent=2)
    print_heading("metrics")
    print_fields({f"train/{key}": value for key, value in one.metrics.items()}, indent=2)


def _plain(one: "Description") -> dict[str, Any]:
    return {**vars(one), "parameters": [vars(p) for p in one.parameters]}


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
