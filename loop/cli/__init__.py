"""The command line `rlake`: what was asked for is done, or one line says why not."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import typer

from . import (  # each adds its commands to the app
    algorithms,
    branch,
    debug,
    evaluate,
    export,
    import_,
    label,
    lineage,
    maintain,
    operators,
    pipeline,
    rewards,
    search,
    selftest,
    serve,
    show,
    snapshot,
    sql,
    tasks,
    undo,
    verify,
)
from . import run as run_module
from .app import IS_PROGRAM, PANELS, app

__all__ = [
    "algorithms",
    "app",
    "branch",
    "debug",
    "evaluate",
    "export",
    "import_",
    "label",
    "lineage",
    "main",
    "maintain",
    "operators",
    "pipeline",
    "rewards",
    "run_command",
    "run_module",
    "search",
    "selftest",
    "serve",
    "show",
    "snapshot",
    "sql",
    "tasks",
    "undo",
    "verify",
]

app.registered_commands.sort(key=lambda command: PANELS.index(str(command.rich_help_panel)))

DONE, FAILED, MISUSED, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
"""Exit codes; the last two as shells count them, 128 and the signal's number: 143 for SIGTERM."""
_LONGEST = 2000
"""Characters of an error that are printed."""
_LONGEST_PATH = 200
_MISNAMED = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EINVAL)
"""What is wrong with a path by itself, whatever is stored there."""
_FROM_LANCE = re.compile(r"LanceError\(|/lance/rust/")


def main() -> None:
    """Run the command that this process was started with, and exit."""
    IS_PROGRAM.set()
    _find_modules_here()
    code = run_command(sys.argv[1:])
    if code == INTERRUPTED:
        # A thread of lance may be reading our rows still; to end Python under it is a crash.
        interrupts = sys.modules.get("rlake.store.interrupts")
        os._exit(interrupts.exit_code() if interrupts else code)
    sys.exit(code)


def _find_modules_here() -> None:
    """Let a configuration name a module in the current folder, as `python -m rlake` does."""
    try:
        here = str(Path.cwd())
    except OSError:  # the folder is gone
        return
    if here not in sys.path:
        sys.path.insert(0, here)


def run_command(args: Sequence[str]) -> int:
    """Run one command and return its exit code.

    Errors that rlake raises on purpose become one line on stderr; a traceback is a bug of ours.
    """
    for arg in args:
        try:
            arg.encode()
        except UnicodeEncodeError:
            _say(f"argument {arg!a} is not text in UTF-8; write it so")
            return MISUSED
    os.environ.setdefault("RUST_LOG", "error")  # or lance warns of tables that do not exist yet
    try:
        code = app(args=list(args), prog_name="rlake", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        return _misused(error)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        return _pipe_closed()
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer caught it, and exits with 1
            return _pipe_closed()
        raise
    except Exception as error:  # noqa: BLE001  the boundary of the program
        from ...store import interrupts

        if not interrupts.caused(error):
            return _failed(error)
        code = INTERRUPTED
    if code == INTERRUPTED:
        _say("interrupted")
    return code if isinstance(code, int) else DONE


def _pipe_closed() -> int:
    """Be silent: whoever read our output has enough. Python flushes at exit: into nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return PIPE_CLOSED


def _misused(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    message = error.format_message()
    if not message:  # a group without a command has printed its help
        return MISUSED
    hint = f" (see `{context.command_path} --help`)" if context else ""
    message = message.replace("Value error, ", "").rstrip(".")
    _say(f"{message[:1].lower()}{message[1:]}{hint}")
    return MISUSED


def _failed(error: Exception) -> int:
    from ...store.errors import RlakeError, damaged

    if type(error).__module__.startswith(("duckdb", "_duckdb")):
        from ...store.query import query_error

        error = query_error(error)  # pyright: ignore[reportArgumentType]
    elif not isinstance(error, RlakeError) and _FROM_LANCE.search(str(error)):
        error = damaged(f"the store ({type(error).__name__})", error)
    if isinstance(error, RlakeError):
        _say(str(error))
        return error.exit_code
    if isinstance(error, OSError) and error.filename is not None:  # of the path that was given
        name = str(error.filename)
        name = name if len(name) <= _LONGEST_PATH else f"{name[:_LONGEST_PATH]}..."
        _say(f"cannot use the path `{name}`: {error.strerror}")
        return MISUSED if error.errno in _MISNAMED else FAILED
    traceback.print_exception(error)
    _say(f"unexpected {type(error).__name__}: this is a mistake in rlake; please report it")
    return FAILED


def _say(message: str) -> None:
    line = " ".join(message.split())
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
    print(f"error: {line}", file=sys.stderr)
