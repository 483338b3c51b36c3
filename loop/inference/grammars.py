"""What an answer must look like: grammars for JSON schemas and for calls of tools.

A grammar is a structural tag of xgrammar as JSON text, which vLLM takes as well.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ...store.errors import missing_extra
from .policy import PolicyError, Sampling, Tools

MOST_BLANKS = 16
"""Most blanks in a row between two tokens of JSON, so that a grammar cannot be all blanks."""
UNENFORCED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("multipleOf", "dependentRequired", "dependentSchemas"),
        *("unevaluatedItems", "unevaluatedProperties"),
    )
)
"""Keywords of JSON Schema that xgrammar accepts and does not enforce."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "enum", "default", "examples")
_CALLS = {
    "hermes": ('<tool_call>\n{"name": %s, "arguments": ', "}\n</tool_call>"),
    "llama": ('{"name": %s, "parameters": ', "}"),
    "json": ('{"name": %s, "arguments": ', "}"),
}
"""What stands before and after the arguments of a call, by format."""


def grammar_of(sampling: Sampling, tools: Tools, *, tool_call_format: str) -> str | None:
    """Return the grammar that an answer must follow; None: it is free.

    Raises PolicyError for a schema that xgrammar does not enforce, and without xgrammar.
    """
    if sampling.json_schema is not None:
        schema = json.loads(sampling.json_schema)
        return _checked(_json(schema), schema, "response_format")
    if not sampling.forced_tools:
        return None
    around = _CALLS.get(tool_call_format)
    if around is None:
        raise PolicyError(
            f"calls in the format `{tool_call_format}` cannot be forced, since special tokens mark "
            f"them; the formats {', '.join(_CALLS)} can",
            finish_reason="invalid_request",
            param="tool_choice",
        )
    functions = [tool["function"] for tool in tools or ()]
    chosen = [f for f in functions if f["name"] in sampling.forced_tools]
    schemas = [f.get("parameters") or {"type": "object"} for f in chosen]
    calls = [
        {
            "type": "tag",
            "begin": around[0] % json.dumps(function["name"]),
            "content": _json(schema),
            "end": around[1],
        }
        for function, schema in zip(chosen, schemas, strict=True)
    ]
    return _checked({"type": "or", "elements": calls}, schemas, "tools")


def _json(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_BLANKS}


def _checked(form: dict[str, Any], schemas: Any, param: str) -> str:
    text = json.dumps({"type": "structural_tag", "format": form})
    for schema in schemas if isinstance(schemas, list) else [schemas]:
        if (name := next(_unenforced(schema), None)) is not None:
            raise PolicyError(
                f"`{param}` has a schema with `{name}`, which cannot be enforced; leave it out",
                finish_reason="invalid_request",
                param=param,
            )
    try:
        import xgrammar
    except ModuleNotFoundError as error:
        raise PolicyError(
            str(missing_extra("xgrammar", "structured")),
            finish_reason="invalid_request",
            param=param,
        ) from error
    try:
        xgrammar.Grammar.from_structural_tag(text)
    except (RuntimeError, ValueError) as error:
        why = str(error).strip().splitlines()[-1].rpartition(".cc:")[2]
        raise PolicyError(
            f"`{param}` has a JSON schema that is not valid: {why[:500]}",
            finish_reason="invalid_request",
            param=param,
        ) from error
    return text


def _unenforced(schema: Any) -> Iterator[str]:
    """Yield the keywords of a schema that are not enforced; names of properties are none."""
    if isinstance(schema, list):
        for part in schema:
            yield from _unenforced(part)
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        if name in UNENFORCED:
            yield name
        elif name in _NAMED and isinstance(value, dict):
            yield from _unenforced(list(value.values()))
        elif name not in _VALUES:
            yield from _unenforced(value)


def offered(tools: Sequence[dict[str, Any]] | None) -> list[str]:
    """Return the names of tools."""
    return [str(tool["function"]["name"]) for tool in tools or ()]
