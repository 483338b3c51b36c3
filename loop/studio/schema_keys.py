"""The keys of the configuration as its JSON Schema has them: for forms."""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
_DEEPEST = 5
"""Most sections within each other."""


def keys(schema: Schema) -> list[str]:
    """Return all keys that hold a value, such as `trainer.steps`, in their order.

    >>> keys({"properties": {"a": {"properties": {"b": {}}}, "c": {}}})
    ['a.b', 'c']
    """
    return list(_below(schema, schema, ()))


def _below(schema: Schema, part: Schema, path: tuple[str, ...]) -> Iterator[str]:
    inner = _section(schema, part).get("properties", {})
    if not inner or len(path) == _DEEPEST:
        yield ".".join(path)
        return
    for name, one in inner.items():
        yield from _below(schema, one, (*path, name))


def described(schema: Schema, key: str) -> str:
    """Return what the schema says of a key; an empty text if nothing.

    >>> described({"properties": {"a": {"description": "How many."}}}, "a")
    'How many.'
    """
    part = _part(schema, key)
    # a section without keys, such as a sampler without settings, is described where it is defined
    return str(part.get("description") or _section(schema, part).get("description", ""))


def choices(schema: Schema, key: str) -> list[str]:
    """Return the values of a key that has only some, as YAML; none for one that is written.

    >>> choices({"properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}}, "b")
    ['x', 'y']
    >>> choices({"properties": {"a": {"anyOf": [{"type": "boolean"}, {"const": "auto"}]}}}, "a")
    ['true', 'false', 'auto']
    """
    part = _part(schema, key)
    found: list[str] = []
    for one in part.get("anyOf", [part]):
        if "enum" in one:
            found += map(str, one["enum"])
        elif "const" in one:
            found.append(str(one["const"]))
        elif one.get("type") == "boolean":
            found += ["true", "false"]
        elif one.get("type") != "null":
            return []
    return found


def _part(schema: Schema, key: str) -> Schema:
    part: Schema = schema
    for name in key.split("."):
        part = _section(schema, part).get("properties", {}).get(name, {})
    return part


def _section(schema: Schema, part: Schema) -> Schema:
    """Return the section that a key refers to, or the key itself."""
    for one in (part, *part.get("anyOf", ()), *part.get("allOf", ())):
        if "properties" in one:
            return one
        if "$ref" in one:
            return _section(schema, schema["$defs"][one["$ref"].rpartition("/")[2]])
    return part
