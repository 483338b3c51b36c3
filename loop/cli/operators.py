"""The command `operators`: list the operators, or describe one."""

from typing import Annotated

from ...store.errors import NotFoundError, nearest
from .app import PIPELINES, JsonOption, app, argument
from .tables import document, parameters_of, print_document, print_json, print_rows, screen


@app.command(rich_help_panel=PIPELINES)
def operators(
    name: Annotated[str | None, argument("Describe this operator.", default="list all")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the operators by kind, or describe one and its parameters."""
    from ...operators.resolve import public

    known = dict(sorted(public().items(), key=lambda item: (item[1].kind, item[0])))
    if name is not None and name not in known:
        raise NotFoundError(f"operator `{name}` does not exist{nearest(name, known)}")
    if as_json:
        chosen = known if name is None else {name: known[name]}
        message = {
            n: {"kind": one.kind, "parameters": parameters_of(one), "text": document(one)}
            for n, one in chosen.items()
        }
        print_json(message)
    elif name is not None:
        one = known[name]
        title = f"{one.name} ({one.kind})"
        print_document(title, document(one), {"parameters": parameters_of(one)})
    else:
        rows = [(n, one.kind, document(one).partition("\n")[0]) for n, one in known.items()]
        print_rows(("operator", "kind", "what it does"), rows)
        screen().print(
            "Data-Juicer's operators are used by name, as in `data_juicer: {NAME: {...}}`; "
            "`python -m rlake.operators.data_juicer` lists them.",
            style="dim",
        )
