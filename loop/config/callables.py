"""Python callables in a configuration: each is replaced with the name that jobs import.

The table `job_events` stores a configuration as text, so a function is written as YAML would name
it. A function that is not an attribute of a module, such as a local one, is registered under a
name of its own for the lifetime of the process.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from ...store.errors import ConfigError

_PLAIN = (str, bytes, int, float, Path, type(None))
_NAME = re.compile(r"([\w.]+):\w+")
_KEPT = "Functions that rlake was given and that are not attributes of a module."


def named(tree: Any) -> Any:
    """Return a plain tree in which each function, class or operator is replaced with its name.

    >>> from rlake.operators import drop_flat_groups
    >>> named({"operators": [drop_flat_groups(min_std=0.1)]})
    {'operators': [{'rlake.operators.filter_groups:drop_flat_groups': {'min_std': 0.1}}]}

    Raises ConfigError for a callable without a name, and for two functions with the same name.
    """
    return _named(tree, {})


def _named(value: Any, known: dict[str, Any]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {_named(key, known): _named(one, known) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_named(one, known) for one in value]
    from ...operators import Operator
    from ...operators.parameters import keys_of

    if isinstance(value, Operator):
        return {value.path: dict(value.params)}
    if is_dataclass(value) and not isinstance(value, type) and not callable(value):
        given, keys = asdict(value), keys_of(type(value))
        parameters = {keys[name]: one for name, one in given.items() if name in keys}
        return {_name(type(value), known): _named(parameters, known)}
    return _name(value, known) if callable(value) else value


def _name(value: Any, known: dict[str, Any]) -> str:
    """Return `module:name` of a function, a class, a tool or a function under `@operator`."""
    origin = value if hasattr(value, "__qualname__") else getattr(value, "function", value)
    path = getattr(origin, "__qualname__", "<lambda>")
    if path.endswith("<lambda>") or isinstance(value, partial):
        raise ConfigError(
            f"{value!r:.200} has no name to be recorded by; write a function with `def`, and give "
            "its parameters as `{function: {parameter: value}}`"
        )
    module, last = origin.__module__, path.rpartition(".")[2]
    if getattr(sys.modules.get(module), path, None) is not value:
        module = _keep(module, path, value)
    name = f"{module}:{last}"
    if known.setdefault(name, value) is not value:
        raise ConfigError(f"two functions are called `{name}`; give them different names")
    return name


def _keep(module: str, path: str, value: Any) -> str:
    """Register a value in a new module, in which every look-up by name finds it."""
    inner = path.replace("<locals>", "locals").split(".")[:-1] or ["locals"]
    home = ".".join([module, *inner])
    setattr(sys.modules.setdefault(home, ModuleType(home, _KEPT)), path.rpartition(".")[2], value)
    return home


def check_importable(tree: Any, where: str) -> None:
    """Raise ConfigError for names that another process cannot import; `where` names the process."""
    if isinstance(tree, Mapping):
        for part in (*tree.keys(), *tree.values()):
            check_importable(part, where)
    elif isinstance(tree, list | tuple):
        for part in tree:
            check_importable(part, where)
    elif isinstance(tree, str) and (found := _NAME.fullmatch(tree)):
        home = sys.modules.get(found[1])
        if found[1] == "__main__" or (home is not None and home.__doc__ == _KEPT):
            raise ConfigError(
                f"`{tree}` is known to this process alone, and {where} imports it; define it at "
                "the top of a module, and import it from there"
            )
