"""JSON in a SELECT over a file: values and parts of them are kept byte for byte."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import duckdb

from ..errors import QueryError
from ..query import literal, nodes, quoted
from ..raw_json import elements, members

_TYPED = ("rewards", "metrics", "segments")
"""Our columns of structs: values of a file under these names are typed."""
_STEPS = re.compile(r'\.(?:"([^"]*)"|([A-Za-z_0-9-]+))|\[(\d+)\]')
_WRITERS = ("to_json", "json_array", "json_object", "json_merge_patch", "json_group_array",
            "json_group_object", "array_to_json", "json", "json_quote")  # fmt: skip
_LENGTHS = ("len", "length", "array_length", "list_length")
_EXTRACTS = {
    "json_extract": "json_part",
    "json_extract_path": "json_part",
    "json_extract_string": "json_text",
    "->>": "json_text",
}
"""DuckDB's functions, which reformat their results, and our replacements."""


def typed(name: str, kind: Any, *, as_json: bool) -> str:
    """Return the SQL that makes a value of the inferred type of its JSON text.

    With `as_json`, values stay JSON text: as structs they would get the keys of all rows, in one
    order, and numbers of one type.
    """
    column = quoted(name)
    if as_json:
        return f"{column}::JSON AS {column}"
    if name == "created_at":
        return f"({column}->>'$')::TIMESTAMPTZ AS {column}"
    if kind.id == "varchar":
        return f"{column}->>'$' AS {column}"
    shape = literal(json.dumps(_shape(kind), ensure_ascii=False))
    return f"from_json({column}, {shape}) AS {column}"


def holds_objects(name: str, kind: Any) -> bool:
    """Return whether values of an inferred type contain objects, or have mixed types."""
    return name not in _TYPED and _is_loose(kind)


def _is_loose(kind: Any) -> bool:
    if kind.id in ("struct", "map", "json") or str(kind) == "JSON":
        return True
    return kind.id in ("list", "array") and _is_loose(kind.children[0][1])


def _shape(kind: Any) -> Any:
    if kind.id == "list":
        return [_shape(kind.children[0][1])]
    if kind.id == "struct":
        return {name: _shape(child) for name, child in kind.children}
    return str(kind)


def teach(con: duckdb.DuckDBPyConnection) -> None:
    """Register the functions that `in_parts` uses in place of DuckDB's."""
    for name, function, gives, kind in (
        ("part", part, "VARCHAR", "JSON"),
        ("text", text_of_part, "VARCHAR", "VARCHAR"),
        ("list", elements_of, "VARCHAR[]", "JSON[]"),
    ):
        takes: Any = ["VARCHAR", "VARCHAR"] if name != "list" else ["VARCHAR"]
        given = "value::JSON::VARCHAR" + (", path::VARCHAR" if name != "list" else "")
        written: Any = gives
        con.create_function(f"spelled_{name}", function, takes, written, null_handling="special")  # pyright: ignore
        con.execute(
            f"CREATE TEMP MACRO json_{name}({'value, path' if name != 'list' else 'value'}) AS "
            f"spelled_{name}({given})::{kind}"
        )


def part(text: str | None, path: str | None) -> str | None:
    """Return a part of a JSON text byte for byte, or None if it does not exist.

    >>> part('{"a": [1.50, {"b" : "\\\\u00e9"}]}', "$.a[1]")
    '{"b" : "\\\\u00e9"}'
    """
    for key in (_steps(path) or ()) if path is not None else ():
        text = _step(text, key) if text is not None else None
    return text if path is not None else None


def text_of_part(text: str | None, path: str | None) -> str | None:
    """Return a part as text: the value of a string, other values byte for byte.

    >>> text_of_part('{"a": "\\u00e9"}', "a")
    'é'
    """
    found = part(text, path)
    value = json.loads(found) if found is not None and found[:1] in '"n' else found
    return value


def elements_of(text: str | None) -> list[str] | None:
    """Return the elements of a JSON list, or None for other values."""
    return elements(text) if text is not None and text.lstrip()[:1] == "[" else None


def _step(text: str, key: str) -> str | None:
    begins = text.lstrip()[:1]
    if begins == "{":
        return members(text).get(key)
    if begins != "[" or not re.fullmatch(r"-?\d+", key):
        return None
    found, at = elements(text), int(key)
    return found[at] if -len(found) <= at < len(found) else None


def _steps(path: str) -> list[str] | None:
    """Return the keys of a path, or None if it selects several values."""
    if path.startswith("/"):
        return [s.replace("~1", "/").replace("~0", "~") for s in path[1:].split("/")]
    if not path.startswith("$"):
        return [path]
    steps = list(_STEPS.finditer(path))
    if "".join(m[0] for m in steps) != path[1:]:
        return None
    return [next(g for g in m.groups() if g is not None) for m in steps]


def in_parts(con: duckdb.DuckDBPyConnection, query: str, columns: Collection[str]) -> str:
    """Rewrite a SELECT so that `->` and `.` on these JSON columns return parts byte for byte.

    Raises QueryError where it indexes or measures a column like a list, which would apply to text.
    """
    row = con.execute("SELECT json_serialize_sql(?)", [query]).fetchall()[0]
    tree = json.loads(row[0])
    if tree["error"]:
        return query
    names = _named_so(tree, set(columns))
    for node in nodes(tree):
        _check(node, names)
    made = _rewritten(tree, names)
    for node in nodes(made):
        _check_written(node, names)
    if made == tree:
        return query
    text = con.execute("SELECT json_deserialize_sql(?::JSON)", [json.dumps(made)]).fetchall()[0]
    return text[0]


def _named_so(tree: object, names: set[str]) -> set[str]:
    """Add the aliases of these columns in a query."""
    # repeatedly: an alias may have an alias in an outer SELECT
    while True:
        found = {str(n["alias"]) for n in nodes(tree) if _column(n) in names and n.get("alias")}
        if found <= names:
            return names
        names = names | found


def _column(node: Mapping[str, Any]) -> str | None:
    return node["column_names"][-1] if node.get("class") == "COLUMN_REF" else None


def _check(node: Mapping[str, Any], names: Collection[str]) -> None:
    for column in _counted(node):
        if column in names:
            raise QueryError(
                f"`{column}` is JSON in the SELECT over `input`: take an element with "
                f"`{column}->0`, counted from 0, text with `{column}->0->>'content'`, how many "
                f"there are with `json_array_length({column})`, or a list with `{column}::JSON[]`"
            )


def _check_written(node: Mapping[str, Any], names: Collection[str]) -> None:
    name = str(node.get("function_name")).lower()
    if name in _WRITERS and any(
        _column(a["expression"]) in names or a["expression"].get("function_name") == "json_part"
        for a in node["arguments"]
    ):
        raise QueryError(
            f"`{name}` writes JSON of the file in another way: numbers, escapes and spaces; "
            "put it together as `{'name': column}` and `[one, other]`, which keep it as it is"
        )


def _counted(node: Mapping[str, Any]) -> Iterator[str | None]:
    """Yield the columns that a node treats as lists."""
    if node.get("type") in ("ARRAY_EXTRACT", "ARRAY_SLICE"):
        yield _column(node["children"][0])
    if node.get("class") == "FUNCTION" and str(node.get("function_name")).lower() in _LENGTHS:
        yield from (_column(a["expression"]) for a in node["arguments"])


def _rewritten(node: Any, names: Collection[str]) -> Any:
    if isinstance(node, list):
        return [_rewritten(n, names) for n in node]
    if not isinstance(node, dict):
        return node
    made = {k: _rewritten(v, names) for k, v in node.items()}
    if made.get("syntax_type") == "SINGLE_ARROW":
        return _arrow(made, made["lhs"], made["expr"])
    name = _EXTRACTS.get(str(made.get("function_name")).lower())
    if name and len(made["arguments"]) == 2:
        return _of(made, name, *(a["expression"] for a in made["arguments"]))
    if _is_list_of_json(made):
        is_ours = _column(made["child"]) in names or made["child"].get("function_name")
        return _call("json_list", made["child"]) | {"alias": made["alias"]} if is_ours else made
    return _fields(made, names)


def _arrow(node: dict[str, Any], value: Any, path: Any) -> dict[str, Any]:
    """Rewrite `->`; DuckDB's parser reads `a->'b'->>'c'` as `a->('b'->>'c')`."""
    if path.get("function_name") == "json_text":
        first, rest = (a["expression"] for a in path["arguments"])
        return _call("json_text", _arrow(node, value, first), rest) | {"alias": node["alias"]}
    return _of(node, "json_part", value, path)


def _is_list_of_json(node: Mapping[str, Any]) -> bool:
    kind = node.get("type_expr", {}) if node.get("class") == "CAST" else {}
    inner = [c["type_name"].upper() for c in kind.get("children", ())]
    return str(kind.get("type_name")).upper() == "LIST" and inner == ["JSON"]


def _of(node: dict[str, Any], name: str, value: Any, path: Any) -> dict[str, Any]:
    """Return the part of a value; a path that is computed per row is left to DuckDB."""
    message = path.get("literal", {}).get("text") if path.get("class") == "CONSTANT" else None
    if message is None:
        return node
    if _steps(str(message)) is None:
        raise QueryError(
            f"the path {message!r} in the SELECT over `input` is none, or chooses several values; "
            "take them from a list: `list_transform(column::JSON[], lambda x: x->'content')`"
        )
    return _call(name, value, path) | {"alias": node.get("alias", "")}


def _fields(node: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return `input.turns.first.role` as a part of `input.turns`."""
    path = node["column_names"] if node.get("class") == "COLUMN_REF" else []
    at = next((i for i, name in enumerate(path[:2]) if name in names), len(path))
    if at >= len(path) - 1:
        return node
    made: dict[str, Any] = {**node, "alias": "", "column_names": path[: at + 1]}
    for key in path[at + 1 :]:
        made = _call("json_part", made, {"class": "CONSTANT", "type": "VALUE_CONSTANT", "alias": "",
                            "literal": {"kind": "STRING", "text": key}})  # fmt: skip
    return made | {"alias": node["alias"] or path[-1]}


def _call(name: str, *given: Any) -> dict[str, Any]:
    return {
        "class": "FUNCTION",
        "type": "FUNCTION",
        "alias": "",
        "function_name": name,
        "schema": "",
        "catalog": "",
        "filter": None,
        "order_bys": {"type": "ORDER_MODIFIER", "orders": []},
        "distinct": False,
        "is_operator": False,
        "export_state": False,
        "arguments": [{"name": "", "expression": e} for e in given],
        "qualified_name": {"path": [name]},
    }
