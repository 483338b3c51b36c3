"""Run one command: it succeeds, or one line explains why it failed."""

import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import typer

from ...store import interrupts
from .app import IS_PROGRAM, PANELS, app
from .commands import MODULE_OF, MODULES, command_of
from .exit_codes import DONE, INTERRUPTED, MISUSED, PIPE_CLOSED
from .failures import failed, say

FORMER = {
    "bench": "selftest",
    "debug workflow --tries": "--rollouts",
    "evaluate --again": "--rerun",
    "explore --join": "--add-explorers",
    "export --with": "--side-columns",
    "feedback settle": "adjudicate",
    "import --skip-bad": "--skip-invalid",
    "pipeline memory": "cache",
    "rescore --at-once": "--max-concurrency",
    "rescore --seconds": "--timeout",
}
"""Former names of commands and options (after their command), and their names today."""
_UNKNOWN = re.compile(r"No such (?:command|option:) '?([\w./-]*\w)")


def app_of(args: Sequence[str] = ()) -> typer.Typer:
    """Return the app with the command that the arguments name; with all where they name none."""
    module = MODULE_OF.get(command_of(args))
    for name in [module] if module else MODULES:
        import_module(f".{name}", __package__)
    # as modules were loaded in any order, and the help page lists commands as they were added
    app.registered_commands.sort(key=lambda c: (PANELS.index(str(c.rich_help_panel)), _place(c)))
    app.registered_groups.sort(key=_place)
    return app


def runnable(args: Sequence[str] = ()) -> Any:
    """Return what runs the command that the arguments name."""
    return _built(app_of(args), len(app.registered_commands), len(app.registered_groups))


@cache  # typer would build all commands anew for each call, which takes longer than most of them
def _built(commands: typer.Typer, *counts: int) -> Any:
    return typer.main.get_command(commands)


def _place(added: Any) -> int:
    return list(MODULE_OF).index(added.name or added.callback.__name__)


def load(args: Sequence[str]) -> None:
    """Load the command that this process, which is the program `rlake`, was started with."""
    IS_PROGRAM.set()
    runnable(args)


def run_command(args: Sequence[str]) -> int:
    """Run one command and return its exit code.

    Errors that rlake raises on purpose become one line on stderr; a traceback is a bug in rlake.
    """
    for arg in args:
        try:
            # bytes that are not UTF-8 arrive as lone surrogates, which no message could print
            arg.encode()
        except UnicodeEncodeError:
            say(f"argument {arg!a} is not text in UTF-8; write it so")
            return MISUSED
    os.environ.setdefault("RUST_LOG", "error")  # else lance warns about tables not created yet
    try:
        code = runnable(args)(args=list(args), prog_name="rlake", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        return _misused(error)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        return _pipe_closed()
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer caught it and exits with 1
            return _pipe_closed()
        raise
    except Exception as error:  # noqa: BLE001  the boundary of the program
        if not interrupts.caused(error):
            return failed(error)
        code = INTERRUPTED
    if code == INTERRUPTED:
        say("interrupted")
    return code if isinstance(code, int) else DONE


def _pipe_closed() -> int:
    # Nobody reads the output any more, and Python would fail when it flushes stdout at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return PIPE_CLOSED


def _misused(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    message = error.format_message()
    if not message:  # a group without a command already printed its help
        return MISUSED
    hint = f" (see `{context.command_path} --help`)" if context else ""
    unknown = _UNKNOWN.match(message)
    if context and unknown:
        path = [*context.command_path.split()[1:], unknown[1]]
        now = FORMER.get(" ".join(path))
        message = f"`{unknown[1]}` is called `{now}`" if now else message
        if unknown[1].endswith((".yaml", ".yml")) and "run" in getattr(
            context.command, "commands", ()
        ):
            message += f" Did you mean `{context.command_path} run {unknown[1]}`?"
    message = message.replace("Value error, ", "").rstrip(".")
    say(f"{message[:1].lower()}{message[1:]}{hint}")
    return MISUSED
