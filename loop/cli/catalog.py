"""The commands `operators`, `workflows` and `config schema`: what configurations may name."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ...store.errors import NotFoundError, nearest
from .app import JOBS, PIPELINES, JsonOption, app, argument, heavy
from .tables import document, parameters_of, print_document, print_json, print_rows, screen

config = typer.Typer(help="Describe configuration files.")
app.add_typer(config, name="config", rich_help_panel=JOBS, no_args_is_help=True)


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
    found = known if name is None else {name: known[name]}
    _print("operator", found, name, as_json=as_json)
    if name is None and not as_json:
        screen().print(
            "Data-Juicer's operators are used by name, as in `data_juicer: {NAME: {...}}`; "
            "`python -m rlake.operators.data_juicer` lists them.",
            style="dim",
        )


@app.command(rich_help_panel=JOBS)
def workflows(
    name: Annotated[
        str | None,
        argument(
            "Describe this workflow, or package.module:function; else list all.", default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the workflows, or describe one and its parameters."""
    from ...operators.import_path import find_function, public_functions

    home = heavy("workflows")
    known = (
        public_functions(home) if name is None else {name: find_function(name, home, "workflow")}
    )
    # The first two parameters are the task and the policy.
    _print("workflow", dict(sorted(known.items())), name, skip=2, as_json=as_json)


def _print(
    what: str, found: Mapping[str, Any], name: str | None, *, skip: int = 0, as_json: bool
) -> None:
    """Print one function and its parameters, or a table with a line for each."""
    kinds = {k: {"kind": one.kind} if what == "operator" else {} for k, one in found.items()}
    parameters = {key: parameters_of(one, skip=skip) for key, one in found.items()}
    texts = {key: document(one) for key, one in found.items()}
    if as_json:
        print_json({k: {**kinds[k], "parameters": parameters[k], "text": texts[k]} for k in found})
    elif name is not None:
        title = f"{name} ({kinds[name]['kind']})" if kinds[name] else name
        print_document(title, texts[name], {"parameters": parameters[name]})
    else:
        head = (what, *next(iter(kinds.values())), "what it does")
        rows = [(k, *kinds[k].values(), texts[k].partition("\n")[0]) for k in found]
        print_rows(head, rows)


@config.callback()
def root() -> None:
    """Describe configuration files."""


@config.command()
def schema() -> None:
    """Print the JSON Schema of configuration files, by which editors complete and check YAML.

    Save it, and name it in the first line of a file: `# yaml-language-server: $schema=rlake.json`.
    """
    from ..config.json_schema import json_schema

    print_json(json_schema())
