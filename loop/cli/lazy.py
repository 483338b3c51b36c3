"""What commands import only when they need it, so that `--help` stays fast: modules, the store."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .app import DEFAULT_STORE

if TYPE_CHECKING:
    from ...store import Store
    from ..config import RunConfig


def heavy(module: str) -> Any:
    """Import a module that needs torch and transformers, or say how to install them."""
    from ...store.errors import missing_extra

    try:
        return import_module(f"...{module}", __name__)
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or module, "train") from error


def opened(settings: "RunConfig", store: Any, job: str, *, create: bool = True) -> "Store":
    """Open the store that the command names, or else the one in the configuration.

    A new one is made only with `create`, for a configuration with which the job can begin.
    """
    place = settings.store if store == DEFAULT_STORE and settings.store else store
    rehearsing = heavy("cli.preflight")
    return rehearsing.open_new(place, lambda: rehearsing.rehearse(settings, job), create=create)
