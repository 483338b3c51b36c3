"""The command that lists operators, or prints what one does and its parameters."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import PIPELINES, JsonOption, app
from .tables import print_fields, print_heading, print_json, print_rows, screen

if TYPE_CHECKING:
    from ...operators.decorator import OperatorFunction


@app.command(rich_help_panel=PIPELINES)
def operators(
    name: Annotated[
        str | None, typer.Argument(help="Print this operator's parameters.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the operators with their kind, or print what one does and its parameters."""
    from ...operators.resolve import public
    from ...store.errors import NotFoundError, nearest

    known = dict(sorted(public().items(), key=lambda item: (item[1].kind, item[0])))
    if name is not None and name not in known:
        raise NotFoundError(f"there is no operator `{name}`{nearest(name, known)}")
    if as_json:
        chosen = known if name is None else {name: known[name]}
        print_json({n: _described(one) for n, one in chosen.items()})
    elif name is not None:
        _print(known[name])
    else:
        rows = [(n, one.kind, _text(one).partition("\n")[0]) for n, one in known.items()]
        print_rows(("operator", "kind", "what it does"), rows)
        screen().print(
            "Data-Juicer's are used by their own names, as `data_juicer: {NAME: {...}}`; "
            "`python -m rlake.operators.data_juicer` lists them.",
            style="dim",
        )


def _described(one: "OperatorFunction[...]") -> dict[str, Any]:
    text = _text(one)
    return {"kind": one.kind, "parameters": _parameters(one), "text": text}


def _print(one: "OperatorFunction[...]") -> None:
    screen().print(f"{one.name} ({one.kind})", style="bold", markup=False)
    screen().print(f"\n{_text(one)}", markup=False)
    if parameters := _parameters(one):
        print_heading("parameters")
        print_fields(parameters, indent=2)


def _text(one: "OperatorFunction[...]") -> str:
    import inspect

    return inspect.getdoc(one) or ""


def _parameters(one: "OperatorFunction[...]") -> dict[str, str]:
    """Return each parameter with its type and its default, as they stand in the signature."""
    import inspect

    return {p.name: str(p).partition(": ")[2] for p in inspect.signature(one).parameters.values()}
