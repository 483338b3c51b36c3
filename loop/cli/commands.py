"""Which module holds which commands: a command loads its own, since all of them take 0.2 s."""

from collections.abc import Sequence

MODULES = {
    "run": ("quickstart", "selftest", "run", "train", "explore"),
    "evaluate": ("evaluate",),
    "serve": ("serve",),
    "algorithms": ("algorithms",),
    "catalog": ("workflows", "operators", "config"),
    "debug": ("debug",),
    "import_": ("import",),
    "export": ("export",),
    "sql": ("sql", "tables"),
    "show": ("show",),
    "search": ("search", "similar", "embed"),
    "label": ("label", "feedback"),
    "rewards": ("rescore", "rewards"),
    "undo": ("undo", "redo"),
    "tasks": ("tasks",),
    "pipeline": ("pipeline",),
    "lineage": ("lineage", "verify"),
    "audit": ("audit",),
    "report": ("report",),
    "studio": ("studio",),
    "snapshot": ("snapshot",),
    "branch": ("branch",),
    "maintain": ("maintain", "doctor", "retention"),
    "check": ("check",),
}
"""Modules of this folder, and the commands that each adds to the app."""
MODULE_OF = {name: module for module, names in MODULES.items() for name in names}
QUESTIONS = {"sql", "tables", "show"}
"""Commands that only read, and run nothing of the user's."""


def command_of(args: Sequence[str]) -> str:
    """Return the first argument that is neither an option of the root nor its value, or nothing."""
    rest = iter(args)
    for arg in rest:
        if arg == "--store":
            next(rest, None)
        elif not arg.startswith("-"):
            return arg
    return ""
