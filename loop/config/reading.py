"""From YAML, recipes and overrides to the tree, or one line that says what is wrong."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from ...store.errors import ConfigError, nearest
from .section import Section
from .tree import RunConfig

_RECIPES = files("rlake.loop.recipes")


def load(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration: a YAML file or a packaged recipe's name, with `a.b=c` overrides.

    Raises ConfigError for a file that is not there, an unknown key (with the nearest known one), or
    a value of the wrong type.
    """
    tree = _yaml(_text(source), str(source))
    if not isinstance(tree, dict):
        raise ConfigError(f"`{source}` must hold keys and values, got {type(tree).__name__}")
    for override in overrides:
        _override(tree, override)
    return build(tree)


def build(tree: Mapping[str, Any]) -> RunConfig:
    """Check a tree of plain values and return the configuration."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def recipes() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(
        p.name.removesuffix(".yaml") for p in _RECIPES.iterdir() if p.name.endswith(".yaml")
    )


def _text(source: str | Path) -> str:
    path = Path(source)
    if path.suffix in {".yaml", ".yml"} or path.exists():
        if not path.is_file():
            raise ConfigError(f"there is no configuration file `{source}`")
        return path.read_text()
    if str(source) not in recipes():
        raise ConfigError(f"there is no recipe `{source}`{nearest(str(source), recipes())}")
    return _RECIPES.joinpath(f"{source}.yaml").read_text()


def _override(tree: dict[str, Any], text: str) -> None:
    path, sign, value = text.partition("=")
    if not sign:
        raise ConfigError(f"`--set {text}` must look like `trainer.steps=100`")
    *parents, last = path.strip().split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            child = node[parent] = {}
        node = child
    node[last] = _yaml(value, f"--set {text}")


def _yaml(text: str, source: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"`{source}` is no YAML: {' '.join(str(error).split())}") from error


def _explain(error: ValidationError) -> str:
    """Say the first thing that is wrong, in our words."""
    errors = error.errors()
    key = errors[0]["loc"][:1]
    # of a value that may have several types, the type that fits best fails deepest in the tree
    first = max((e for e in errors if e["loc"][:1] == key), key=lambda e: len(e["loc"]))
    where = ".".join(str(p) for p in first["loc"] if p != "str" and not str(p).startswith("dict["))
    if first["type"] == "extra_forbidden":
        section = _section(first["loc"][:-1])
        return f"unknown key `{where}`{nearest(str(first['loc'][-1]), section.model_fields)}"
    if first["type"] == "missing":
        return f"key `{where}` is missing; add it to the configuration"
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    got = "" if first["type"] == "value_error" else f", got {first['input']!r}"
    return f"`{where}`: {message}{got}" if where else message


def _section(path: Sequence[int | str]) -> type[Section]:
    """Return the class that describes the part of the tree at `path`."""
    section: type[Section] = RunConfig
    for name in path:
        if name in section.model_fields:  # else it is a name of the user's, as in `mix`
            section = next(_sections(section.model_fields[str(name)].annotation))
    return section


def _sections(kind: Any) -> Iterator[type[Section]]:
    """Yield the sections that a type is made of."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    for part in get_args(kind):
        yield from _sections(part)
