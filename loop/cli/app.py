"""The typer app, and the options that commands share. Loads nothing heavy."""

from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ...store import Store

DEFAULT_STORE = "./lake"

JOBS, ROWS, PIPELINES, PROOF, CARE = "Jobs", "Rows", "Pipelines", "Time and proof", "Care"
IS_PROGRAM = Event()
"""Set where the process is the program `rlake`, and is not someone's that calls `run`."""
PANELS = (JOBS, ROWS, PIPELINES, PROOF, CARE)
"""Headings of the help page, in their order."""

app = typer.Typer(
    name="rlake",
    help="Reinforcement fine-tuning whose centre is data: every rollout is a row of a table.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    store: Annotated[
        str, typer.Option(envvar="RLAKE_STORE", help="The store's folder or s3:// address.")
    ] = DEFAULT_STORE,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Take the options that stand before the command."""
    ctx.obj = store
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"rlake {installed('rlake')}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def _chosen(ctx: typer.Context, value: str | None) -> str:
    """Return the store named after the command, else the one named before it or in RLAKE_STORE."""
    return value or ctx.find_root().obj or DEFAULT_STORE


StoreOption = Annotated[
    Any,  # a str in commands: the callback fills it in
    typer.Option(
        "--store",
        callback=_chosen,
        parser=str,
        metavar="PLACE",
        show_default=False,
        help=f"The store's folder or s3:// address; RLAKE_STORE, else {DEFAULT_STORE}.",
    ),
]
AtOption = Annotated[
    str | None,
    typer.Option(metavar="SNAPSHOT", help="A snapshot's name: the store as it was."),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Also while something that is not done needs it.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON: one object, as the last line.")
]


def listen() -> None:
    """Let signals end this process when it is the program `rlake`: before it does anything."""
    from ...store import interrupts

    if IS_PROGRAM.is_set():
        interrupts.listen()


def open_store(place: str, *, create: bool = False, at: str | None = None) -> "Store":
    """Open the store that a command was given; only commands that write make a new one."""
    from ...store import connect

    listen()
    store = connect(place, create=create)
    return store if at is None else store.at(at)
