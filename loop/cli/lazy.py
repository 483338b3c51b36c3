"""Modules that are imported when a command needs them, so that `--help` stays fast."""

from importlib import import_module
from typing import Any


def heavy(module: str) -> Any:
    """Import a module that needs torch and transformers, or say how to install them."""
    from ...store.errors import missing_extra

    try:
        return import_module(f"...{module}", __name__)
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or module, "train") from error
