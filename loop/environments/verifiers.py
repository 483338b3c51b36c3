"""Load environments of the package verifiers, for its workflow and tasks."""

import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ...operators.import_path import find_function
from ...store.errors import ConfigError, missing_extra

if TYPE_CHECKING:
    from verifiers import Environment


def loaded(environment: str, arguments: Mapping[str, Any] | None = None) -> "Environment":
    """Return an environment of verifiers, which is loaded once per process."""
    # As JSON: the cache needs hashable arguments.
    return _loaded(environment, json.dumps(dict(arguments or {}), sort_keys=True))


@cache
def _loaded(environment: str, arguments: str) -> "Environment":
    try:
        import verifiers as package
    except ImportError as error:
        raise missing_extra("verifiers", "environments") from error
    given = json.loads(arguments)
    if ":" in environment:
        return find_function(environment, None, "environment")(**given)
    try:
        return package.load_environment(environment, **given)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"verifiers has no environment `{environment}`: {str(error).splitlines()[0]}"
        ) from error
