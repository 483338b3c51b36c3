"""The JSON Schema of a configuration file, by which editors complete and check YAML."""

from collections.abc import Iterator
from typing import Any

from .base import Choice
from .load import recipes
from .run import RunConfig
from .schedule import PRESETS

_SOURCE = {"type": ["string", "array"], "items": {"type": "string"}}
_SHORT: dict[str, dict[str, Any]] = {
    "FileConfig": _SOURCE,
    "TaskSourceConfig": _SOURCE,
    "KeepConfig": {"type": "integer"},
    "ScheduleConfig": {"enum": list(PRESETS)},
    "TasksetConfig": {"type": "number"},
}
"""Sections that accept a single value, which pydantic cannot see in their validators."""


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of configuration files.

    Each key has its type, default and description. No key is required, because `extends` may
    provide it; the checks that compare several keys run when the file is loaded.

    >>> json_schema()["$defs"]["TrainerConfig"]["properties"]["max_uses"]["default"]
    1
    """
    tree = RunConfig.model_json_schema()
    parts = tree.pop("$defs")
    short = _SHORT | {choice.__name__: {"enum": choice.known()} for choice in _choices(Choice)}
    for name in short.keys() & parts.keys():
        parts[name] = {"anyOf": [short[name], parts[name]]}
    stages = {"type": "object", "additionalProperties": {"type": "object"}}
    extends = {"type": "string", "examples": recipes()}
    tree["properties"] |= {
        "extends": extends | {"description": "A recipe or a file over which this file is merged."},
        "stages": stages | {"description": "Stages that run one after the other, by name."},
    }
    del tree["required"]
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | tree | {"$defs": parts}
    return _tidied(whole)


def _choices(kind: type[Choice]) -> Iterator[type[Choice]]:
    for one in kind.__subclasses__():
        yield one
        yield from _choices(one)


def _tidied(value: Any) -> Any:
    # Titles only repeat keys; pydantic writes `ge` and `le`, which are not keywords of JSON
    # Schema, where a validator precedes them.
    if isinstance(value, list):
        return [_tidied(one) for one in value]
    if not isinstance(value, dict):
        return value
    is_named = "properties" in value or "enum" in value or "type" in value or "anyOf" in value
    left_out = {"title", "ge", "le"} if is_named else set()
    return {key: _tidied(one) for key, one in value.items() if key not in left_out}
