"""Environments of the package verifiers, as a workflow: its dataset, its rollouts, its rubric."""

import json
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...store.errors import ConfigError, missing_extra
from ..config.resolve import function

if TYPE_CHECKING:
    from verifiers import Environment


def loaded(environment: str, arguments: Mapping[str, Any] | None = None) -> "Environment":
    """Return an environment of verifiers, made once in this process."""
    return _loaded(environment, json.dumps(dict(arguments or {}), sort_keys=True))


@cache
def _loaded(environment: str, arguments: str) -> "Environment":
    try:
        import verifiers as package
    except ImportError as error:
        raise missing_extra("verifiers", "verifiers") from error
    given = json.loads(arguments)
    if ":" in environment:
        return function(environment, ModuleType("none"), "environment")(**given)
    try:
        return package.load_environment(environment, **given)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"verifiers has no environment `{environment}`: {str(error).splitlines()[0]}"
        ) from error
