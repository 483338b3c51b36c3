"""The command line `rlake`, which loads what the command it was given needs."""

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .commands import QUESTIONS, command_of
from .exit_codes import DONE as DONE
from .exit_codes import FAILED as FAILED
from .exit_codes import INTERRUPTED as INTERRUPTED
from .exit_codes import MISUSED as MISUSED


def main() -> None:
    """Run the command that this process was started with, and exit."""
    args = sys.argv[1:]
    _find_modules_here()
    _load(args)
    code = run_command(args)
    if code == INTERRUPTED:
        from ...store import interrupts

        # A thread of lance may still read our rows; shutting Python down under it is a crash.
        os._exit(interrupts.exit_code())
    sys.exit(code)


def run_command(args: Sequence[str]) -> int:
    """Run one command and return its exit code.

    Errors that rlake raises on purpose become one line on stderr; a traceback is a bug in rlake.
    """
    from . import program

    return program.run_command(args)


def _load(args: Sequence[str]) -> None:
    """Load the command's modules."""
    # All of it stays until the end: a search for garbage in it, while it is loaded and when Python
    # ends, takes a third of a short command's time.
    gc.disable()
    if command_of(args) in QUESTIONS:
        _load_arrow()
    from . import program

    program.load(args)
    gc.freeze()
    gc.enable()


class _NoPandas:
    """A finder that finds no pandas."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def _load_arrow() -> None:
    """Load pyarrow without pandas, which it loads by itself where it is installed: 0.1 s."""
    sys.meta_path.insert(0, _NoPandas)
    try:
        import pyarrow.dataset  # noqa: F401
    finally:
        sys.meta_path.remove(_NoPandas)


def _find_modules_here() -> None:
    """Add the current folder to the path, as `python -m` does, for modules named in YAML."""
    try:
        here = str(Path.cwd())
    except OSError:  # the folder was deleted
        return
    if here not in sys.path:
        sys.path.insert(0, here)
