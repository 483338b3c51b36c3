"""The typer app, and the options that commands share. Loads nothing heavy."""

from collections.abc import Callable
from importlib import import_module
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...store import Store, connect, interrupts
from ...store.errors import ConfigError, NotAStoreError, message_of, missing_extra

if TYPE_CHECKING:
    from ..config import RunConfig

DEFAULT_STORE = "./lake"

JOBS, ROWS, PIPELINES, PROOF, CARE = "Jobs", "Rows", "Pipelines", "Time and proof", "Care"
IS_PROGRAM = Event()
"""Set in the program `rlake`; not in a process of a user that calls `run_command`."""
PANELS = (JOBS, ROWS, PIPELINES, PROOF, CARE)
"""Headings of the help page, in their order."""


def option(help: str, *names: str, default: str | bool = True, **checks: Any) -> Any:
    """Declare an option by its help, and by its names where the parameter does not say them.

    `default` is how help pages write a default that the parameter cannot show; False: not at all.
    """
    return typer.Option(*names, help=help, show_default=default, **checks)


def argument(help: str, *, default: str | bool = True, **checks: Any) -> Any:
    """Declare an argument by its help; `default` as for `option`."""
    return typer.Argument(help=help, show_default=default, **checks)


app = typer.Typer(
    name="rlake",
    help="Reinforcement fine-tuning of language models with the data at the center.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    store: Annotated[
        str, option("Use the store at this folder or s3:// address.", envvar="RLAKE_STORE")
    ] = DEFAULT_STORE,
    version: Annotated[bool, option("Print the version and exit.", "--version")] = False,
) -> None:
    """Take the options that stand before the command."""
    ctx.obj = store
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"rlake {installed('rlake')}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def _chosen(ctx: typer.Context, value: str | None) -> str:
    # An option after the command wins over the same option before it, and over RLAKE_STORE.
    return value or ctx.find_root().obj or DEFAULT_STORE


StoreOption = Annotated[
    Any,  # a str in commands: the callback fills it in
    option(
        "Use the store at this folder or s3:// address.",
        "--store",
        callback=_chosen,
        parser=str,
        metavar="PLACE",
        default=f"RLAKE_STORE, else {DEFAULT_STORE}",
    ),
]
AtOption = Annotated[
    str | None, option("Read the store as it was at this snapshot.", metavar="SNAPSHOT")
]
WhereOption = Annotated[
    str | None,
    option('Use only the experiences that match this condition: "reward >= 1".', metavar="SQL"),
]
SeedOption = Annotated[int, option("Seed all random choices with this number.", min=0)]
ForceOption = Annotated[bool, option("Do it even while an unfinished job needs it.", "--force")]
JsonOption = Annotated[bool, option("Print one JSON object, as the last line.", "--json")]


def listen() -> None:
    """Let signals end this process at once, if it is the program `rlake`."""
    if IS_PROGRAM.is_set():
        interrupts.listen()


def open_store(
    place: str,
    *,
    create: bool = False,
    at: str | None = None,
    check: Callable[[], object] | None = None,
) -> "Store":
    """Open the store that a command was given; only commands that write create a new one.

    `check` runs before a store is created, so that a command that cannot work leaves none behind.
    """
    listen()
    if create and check is not None:
        try:
            return connect(place, create=False)
        except NotAStoreError:
            check()
    store = connect(place, create=create)
    return store if at is None else store.at(at)


def heavy(module: str, extra: str = "train") -> Any:
    """Import a module of `loop` that needs the packages of an extra, or say how to install them."""
    try:
        # by name: `rlake --help` must not load torch
        return import_module(f"...{module}", __name__)
    except ModuleNotFoundError as error:
        if error.name is None:  # transformers raises one of its own for any error of an import
            cause = message_of(error.__cause__ or error)
            raise ConfigError(f"a package of `rlake[{extra}]` cannot be loaded: {cause}") from error
        raise missing_extra(error.name, extra) from error


def opened(settings: "RunConfig", store: Any, job: str, *, create: bool = True) -> "Store":
    """Open the store that the command names, or else the one in the configuration.

    A new one is created only with `create`, for a configuration with which the job can start.
    """
    place = settings.store if store == DEFAULT_STORE and settings.store else store
    check = lambda: heavy("cli.preflight").rehearse(settings, job)  # noqa: E731
    return open_store(place, create=create, check=check)
