"""From YAML, recipes and overrides to the tree, or one line that says what is wrong."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from ...store.errors import ConfigError, nearest
from ...store.files.text import read_text
from ...store.files.yaml_text import parse_yaml
from .base import Section
from .run import RunConfig

_RECIPES = files("rlake.loop.recipes")
_WHOLE = {("algorithm",), ("tasks", "make"), ("tasks", "select"), ("data", "make")} | {
    ("explorer", "engine"),
    ("explorer", "rewards"),
    ("explorer", "workflow"),
    ("trainer", "sampler"),
}
"""Keys under which something is chosen by name: one choice takes the place of another."""
_MODELS = {("model",), ("trainer", "reference"), ("trainer", "teacher")}
_ORIGINS = {"path", "tiny", "run"}
"""Where a model may come from: one takes the place of another."""

_LONGEST, _LONGEST_MESSAGE = 200, 2000
"""Characters of a wrong value that a message shows, and of a message."""


def load(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration: a YAML file or a packaged recipe's name, with `a.b=c` overrides.

    One with `extends: NAME` or a file, relative to its own folder, is merged key by key over that
    one, which may extend another. What is chosen by a name, as the algorithm, is replaced as a
    whole; null takes a section away.

    Raises ConfigError for a file that is not there, an unknown key (with the nearest known one), or
    a value of the wrong type.
    """
    tree = read(source)
    if "stages" in tree:
        raise ConfigError(
            f"`{source}` runs in stages: `rlake run` runs them in order; name one of "
            f"{', '.join(tree['stages'] or ())} with `--stage`"
        )
    for change in overrides:
        override(tree, change)
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


def read(source: str | Path, below: Sequence[str] = ()) -> dict[str, Any]:
    """Return a configuration as plain values, merged over what it extends."""
    path = Path(source)
    is_file = path.suffix in {".yaml", ".yml"} or path.exists()
    name = str(path.resolve()) if is_file else str(source)
    if name in below:
        raise ConfigError(f"`{below[0]}` extends itself: {' extends '.join([*below, name])}")
    tree = parse_yaml(_text(source), f"`{source}`")
    if not isinstance(tree, dict):
        raise ConfigError(f"`{source}` must hold keys and values, got {type(tree).__name__}")
    extended = tree.pop("extends", None)
    if extended is None:
        return tree
    if not isinstance(extended, str):
        raise ConfigError(f"`{source}`: `extends` must name a recipe or a file, got {extended!r}")
    beside = path.parent / extended
    return merged(read(beside if is_file and beside.exists() else extended, [*below, name]), tree)


def merged(
    tree: Mapping[str, Any], changes: Mapping[str, Any], *, path: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a tree of plain values with another laid over it, key by key."""
    made = dict(tree)
    if path in _MODELS and _ORIGINS & changes.keys():
        made = {key: old for key, old in made.items() if key not in _ORIGINS - changes.keys()}
    for key, value in changes.items():
        old, here = made.get(key), (*path, key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and here not in _WHOLE:
            value = merged(old, value, path=here)
        made[key] = value
    return made


def _text(source: str | Path) -> str:
    path = Path(source)
    if path.suffix in {".yaml", ".yml"} or path.exists():
        if not path.is_file():
            raise ConfigError(f"there is no configuration file `{source}`")
        return read_text(path, what="the configuration ")
    if str(source) not in recipes():
        raise ConfigError(f"there is no recipe `{source}`{nearest(str(source), recipes())}")
    return _RECIPES.joinpath(f"{source}.yaml").read_text()


def override(tree: dict[str, Any], text: str) -> None:
    """Set one value of a tree, as in `trainer.steps=100`; ConfigError for another form."""
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
    node[last] = parse_yaml(value, f"`--set {text}`")


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
    message = message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."
    got = "" if first["type"] == "value_error" else f", got {_short(first['input'])}"
    return f"`{where}`: {message}{got}" if where else message


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."


def _section(path: Sequence[int | str]) -> type[Section]:
    """Return the class that describes the part of the tree at `path`."""
    section: type[Section] = RunConfig
    for name in path:
        if name in section.model_fields:  # else it is a name of the user's, as in `mix`
            inner = _sections(section.model_fields[str(name)].annotation)
            section = next(inner, section)
    return section


def _sections(kind: Any) -> Iterator[type[Section]]:
    """Yield the sections that a type is made of."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    for part in get_args(kind):
        yield from _sections(part)
