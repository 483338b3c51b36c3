"""Read text and YAML written by people, with limits and checks."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, InputError, message_of

MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 100
MAX_VALUES = 100_000
"""Number of values in total, counting those that aliases repeat."""


def read_text(path: Path, *, what: str = "") -> str:
    """Return a file's text; raise InputError, calling the file `what`, when it cannot be read.

    >>> read_text(tmp / "none.yaml", what="the recipe ")
    Traceback (most recent call last):
    ...
    rlake.store.errors.InputError: cannot read the recipe `...none.yaml`: No such file or directory
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise InputError(f"cannot read {what}`{path}`: {message}") from error


def parse_yaml(text: str, what: str) -> Any:
    """Return the value of a YAML text; raise ConfigError, calling it `what`, when it is invalid.

    Texts that are too long, nested too deeply, or expand to too many values by aliases are refused,
    and so are repeated keys in a mapping, of which YAML would keep the last.

    >>> parse_yaml("a: {b: [1, 2]}", "it")
    {'a': {'b': [1, 2]}}
    >>> parse_yaml("steps: 1\\nsteps: 2", "`my.yaml`")
    Traceback (most recent call last):
    ...
    rlake.store.errors.ConfigError: `my.yaml` is not valid YAML: key `steps` comes twice, line 2...
    """
    try:
        if len(text) > MAX_CHARACTERS:
            raise ValueError(
                f"it has {len(text):,} characters, at most {MAX_CHARACTERS:,} are read"
            )
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{what} is not valid YAML: {_said(error)}") from error


def _said(error: Exception) -> str:
    """Return what is wrong, after its line; PyYAML names a text where a file could stand."""
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return message_of(error).replace('"<unicode string>", ', "")
    begun = f" (from line {error.context_mark.line + 1})" if error.context_mark else ""
    context = f"{error.context}{begun}, " if error.context else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {context}{error.problem}"


class _Loader(yaml.SafeLoader):
    """The safe loader with limits, so that a small text cannot expand to a huge value."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        before = self._values
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise ValueError("an alias stands within what it names")
        # aliases of aliases double with each line, so what they stand for is counted
        self._values += self._sizes[id(node)] if is_alias else 1
        if self._values > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES:,} values, those of aliases counted")
        self._sizes.setdefault(id(node), self._values - before)
        return node

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # noqa: FBT001, FBT002  as it is called
    ) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise ValueError(f"key `{key.value}` comes twice, line {line} is the second")
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)
