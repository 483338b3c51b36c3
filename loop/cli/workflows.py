"""The command `workflows`: list the workflows, or describe one."""

from typing import Annotated

from .app import JOBS, JsonOption, app, argument, heavy
from .tables import document, parameters_of, print_document, print_json, print_rows


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
    if name is None:
        found = dict(sorted(public_functions(home).items()))
    else:
        found = {name: find_function(name, home, "workflow")}
    if as_json:
        # The first two parameters are the task and the policy.
        message = {
            key: {"parameters": parameters_of(one, skip=2), "text": document(one)}
            for key, one in found.items()
        }
        print_json(message)
    elif name is None:
        rows = [(key, document(one).partition("\n")[0]) for key, one in found.items()]
        print_rows(("workflow", "what it does"), rows)
    else:
        own = {"parameters": parameters_of(found[name], skip=2)}
        print_document(name, document(found[name]), own)
