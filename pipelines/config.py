"""The YAML form of a pipeline, with unknown keys refused."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..operators import Operator
from ..operators.data_juicer import recipe
from ..operators.resolve import Spec, resolve_all
from ..store.errors import ConfigError, nearest
from ..store.files.yaml_text import parse_yaml, read_text
from . import expectations
from .executors import build, executor_of
from .expectation import Expectation
from .source import File, Sql, Table

_KEYS = ("name", "source", "operators", "sink", "executor", "max_failed", "on_empty", "expect")
_PLACES: dict[str, type[Table | Sql | File]] = {"table": Table, "sql": Sql, "file": File}


def parse(text: str | Path) -> dict[str, Any]:
    """Return the fields of a pipeline: from a YAML file, or the text itself.

    Raises ConfigError for unknown keys or values, InputError for a file that cannot be read.
    """
    tree = _tree(text)
    for key in tree:
        if key not in _KEYS:
            raise ConfigError(f"a pipeline has no key `{key}`{nearest(str(key), _KEYS)}")
    for key in ("name", "source"):
        if tree.get(key) is None:
            raise ConfigError(f"a pipeline needs `{key}`")
    if not isinstance(tree["name"], str):
        raise ConfigError(f"`name` must be text, got {tree['name']!r}")
    sink = tree.get("sink")
    made = {
        "name": tree["name"],
        "source": _place(tree["source"], "source", tuple(_PLACES)),
        "operators": _operators(tree.get("operators")),
        "sink": None if sink is None else _place(sink, "sink", ("table", "file")),
    }
    if tree.get("executor") is not None:
        made["executor"] = executor_of(tree["executor"])
    if tree.get("expect") is not None:
        made["expect"] = expected(tree["expect"])
    share = tree.get("max_failed")
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float)):
        raise ConfigError(f"`max_failed` must be a share between 0 and 1, got {share!r}")
    return made | {k: tree[k] for k in ("max_failed", "on_empty") if tree.get(k) is not None}


def resolved(specs: Iterable[Spec | Operator]) -> list[Operator]:
    """Build the operators that a pipeline names, recipes of Data-Juicer's expanded."""
    return resolve_all(specs, expand=recipe.operators_of)


def expected(given: Any) -> dict[str, tuple[Expectation, ...]]:
    """Return the expectations of a pipeline's `source` and `sink`."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"`expect` must be `{{source: [...], sink: [...]}}`, got {given!r}")
    for key in given:
        if key not in ("source", "sink"):
            raise ConfigError(f"`expect` has no key `{key}`{nearest(str(key), ('source', 'sink'))}")
    return {key: expectations.build(given[key] or (), f"expect.{key}") for key in given}


def _tree(text: str | Path) -> Mapping[str, Any]:
    is_path = isinstance(text, Path) or ("\n" not in text and text.endswith((".yaml", ".yml")))
    name = f"`{text}`" if is_path else "the pipeline"
    written = read_text(Path(text)) if is_path else str(text)
    tree = parse_yaml(written, name)
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"{name} must hold `name`, `source`, `operators` and `sink`, got {type(tree).__name__}"
        )
    return tree


def _operators(specs: Any) -> list[Operator]:
    if specs is not None and not isinstance(specs, list):
        raise ConfigError(f"`operators` must be a list, got {specs!r}")
    return resolved(specs or ())


def _place(given: Any, what: str, kinds: tuple[str, ...]) -> Table | Sql | File:
    one_of = " or ".join(f"`{{{kind}: ...}}`" for kind in kinds)
    if not isinstance(given, Mapping):
        raise ConfigError(f"`{what}` must be {one_of}, got {given!r}")
    # a file may have an SQL text too, so the more telling keys come first
    kind = next((k for k in ("table", "file", "sql") if k in given and k in kinds), None)
    if kind is None:
        near = nearest(str(next(iter(given), "")), kinds)
        raise ConfigError(f"`{what}` must be {one_of}, got {dict(given)!r}{near}")
    return build(_PLACES[kind], given, what)
