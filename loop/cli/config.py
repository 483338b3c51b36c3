"""The commands about configuration files."""

import typer

from .app import JOBS, app
from .tables import print_json

commands = typer.Typer(help="Describe configuration files.")
app.add_typer(commands, name="config", rich_help_panel=JOBS, no_args_is_help=True)


@commands.callback()
def root() -> None:
    """Describe configuration files."""


@commands.command()
def schema() -> None:
    """Print the JSON Schema of configuration files, by which editors complete and check YAML.

    Save it, and name it in the first line of a file: `# yaml-language-server: $schema=rlake.json`.
    """
    from ..config.json_schema import json_schema

    print_json(json_schema())
