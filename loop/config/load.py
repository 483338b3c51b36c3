"""Read YAML files and recipes, merge them, and apply overrides."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...store.errors import ConfigError, nearest
from ...store.files.yaml_text import parse_yaml, read_text

_RECIPES = files("rlake.loop.recipes")
_WHOLE = {("algorithm",), ("tasks", "generator"), ("tasks", "selector"), ("data", "generator")} | {
    ("explorer", "engine"),
    ("explorer", "rewards"),
    ("explorer", "workflow"),
    ("trainer", "sampler"),
    *(("evaluate", key) for key in ("engine", "rewards", "workflow")),
    *(("tasks", "mixture", "*", key) for key in ("rewards", "selector", "workflow")),
    *(("evaluate", "tasksets", "*", key) for key in ("rewards", "workflow")),
}
"""Keys that select something by name: a choice replaces another one as a whole. `*` is any name."""
_MODELS = {("model",), ("trainer", "reference"), ("trainer", "teacher")}
_ORIGINS = {"path", "from_scratch", "run"}
"""Sources of a model, which has one: a `path` laid over a `run` replaces it."""


def recipes() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(
        p.name.removesuffix(".yaml") for p in _RECIPES.iterdir() if p.name.endswith(".yaml")
    )


def read(source: str | Path, below: Sequence[str] = ()) -> dict[str, Any]:
    """Return a configuration as plain values, merged over the one that it extends."""
    path = Path(source)
    is_file = path.suffix in {".yaml", ".yml"} or path.exists()
    name = str(path.resolve()) if is_file else str(source)
    if name in below:
        raise ConfigError(f"`{below[0]}` extends itself: {' extends '.join([*below, name])}")
    tree = parse_yaml(_text(source), f"`{source}`")
    if not isinstance(tree, dict):
        raise ConfigError(f"`{source}` must hold keys and values, got {type(tree).__name__}")
    if {"source", "operators"} <= tree.keys():
        raise ConfigError(f"`{source}` is a pipeline; run it with `rlake pipeline run {source}`")
    extended = tree.pop("extends", None)
    if extended is None:
        return tree
    if not isinstance(extended, str):
        raise ConfigError(f"`{source}`: `extends` must name a recipe or a file, got {extended!r}")
    # A file in the same folder comes before a recipe of that name.
    sibling = path.parent / extended
    return merged(read(sibling if is_file and sibling.exists() else extended, [*below, name]), tree)


def merged(
    tree: Mapping[str, Any], changes: Mapping[str, Any], *, path: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a tree of plain values with another laid over it, key by key."""
    made = dict(tree)
    _replace_origin(made, path, changes)
    for key, value in changes.items():
        old, here = made.get(key), (*path, key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            any_name = (*here[:2], "*", *here[3:])
            if not {here, any_name} & _WHOLE:
                value = merged(old, value, path=here)
        made[key] = value
    return made


def _text(source: str | Path) -> str:
    path = Path(source)
    if path.suffix in {".yaml", ".yml"} or path.exists():
        if not path.is_file():
            raise ConfigError(f"configuration file `{source}` does not exist")
        return read_text(path, what="the configuration ")
    if str(source) not in recipes():
        raise ConfigError(f"recipe `{source}` does not exist{nearest(str(source), recipes())}")
    return _RECIPES.joinpath(f"{source}.yaml").read_text()


def override(tree: dict[str, Any], text: str) -> None:
    """Set one value of a tree, as in `trainer.steps=100`; ConfigError for another form."""
    path, sign, value = text.partition("=")
    if not sign:
        raise ConfigError(f"`--set {text}` must look like `trainer.steps=100`")
    given = parse_yaml(value, f"`--set {text}`")
    *parents, last = path.strip().split(".")
    node = tree
    for place, parent in enumerate(parents):
        _replace_origin(node, tuple(parents[:place]), [parent])
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            # A plain value, such as the name of an algorithm, gives way to the keys below it.
            child = node[parent] = {}
        node = child
    if given is not None:
        _replace_origin(node, tuple(parents), [last])
    node[last] = given


def _replace_origin(node: dict[str, Any], path: tuple[str, ...], keys: Iterable[str]) -> None:
    """Leave out where a model came from if a key, below `path`, says where it comes from."""
    if path in _MODELS and (given := _ORIGINS.intersection(keys)):
        for other in _ORIGINS - given:
            node.pop(other, None)
