"""Join filters: of a large table, a query reads the rows that its joins can match, by an index.

DuckDB derives such filters while a query runs, but does not hand them to tables of Arrow: a join
with the rows of one step would read the IDs of all rows. Here they are derived from DuckDB's own
plan of the query, made over empty tables. What the plan does not prove is read whole.
"""

import json
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, reduce
from typing import Any, NamedTuple

import duckdb
import lance
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pds

from .schema import TABLES

_MOST, _SHARE = 10_000, 100
"""A filter has at most so many values, and one for so many rows: looking one up takes 10 us, where
reading a row takes a hundredth of that."""
_SMALL = 100_000
"""Rows of a table whose columns are read whole in a few milliseconds."""
_PASSES = {
    "cte_inlining", "deliminator", "expression_rewriter", "filter_pullup", "filter_pushdown",
}  # fmt: skip
"""The optimizer's passes that depend on a query alone, not on how many rows its tables have."""
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "COMPARE_EQUAL": operator.eq,
    "COMPARE_GREATERTHAN": operator.gt,
    "COMPARE_GREATERTHANOREQUALTO": operator.ge,
    "COMPARE_LESSTHAN": operator.lt,
    "COMPARE_LESSTHANOREQUALTO": operator.le,
}
_LEFT_STAYS = {"INNER", "LEFT", "SEMI", "ANTI", "MARK", "SINGLE"}
"""Joins whose left rows come out as they are, or do not come out."""
# of which side rows without a match change nothing
_LEFT_MATCHES = {"INNER", "SEMI", "RIGHT"}
_RIGHT_MATCHES = {"INNER", "SEMI", "LEFT", "ANTI", "SINGLE"}

Node = dict[str, Any]
"""A node of DuckDB's logical plan, as JSON."""


class _Match(NamedTuple):
    """A column of a scan must equal a column of another, or its rows change nothing."""

    column: str
    source: Node
    source_column: str
    null_matches: bool


class FilteredDataset(pds.Dataset):
    """Rows of a Lance dataset that satisfy a condition, for DuckDB to scan."""

    def __init__(self, rows: lance.LanceDataset, only: pc.Expression) -> None:
        self._rows, self._only = rows, only

    @property
    def schema(self) -> pa.Schema:
        """The columns of the dataset."""
        return self._rows.schema

    def scanner(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, columns: list[str] | None = None, filter: pc.Expression | None = None
    ) -> pds.Scanner:
        """Scan the rows that satisfy a further condition too."""
        both = self._only if filter is None else self._only & filter
        return self._rows.scanner(columns=columns, filter=both)


def join_filters(
    query: str, tables: Mapping[str, lance.LanceDataset], plan: Callable[[str], Node | None]
) -> dict[str, pc.Expression]:
    """Return conditions on tables under which a query has the same result as on all their rows.

    `tables` are those that the query may read; `plan` gives its plan over tables without rows.
    """
    if len(tables) < 2 or not any(map(_indexed, tables.values())):
        return {}  # planning takes 2 ms
    if any(set(rows.schema.names) - set(TABLES[name].names) for name, rows in tables.items()):
        return {}  # a column of another program may be what a name of the query means
    planned = plan(query)
    return {} if planned is None else _Reading(planned, tables).filters()


def plan(query: str, database: duckdb.DuckDBPyConnection) -> Node | None:
    """Return DuckDB's plan of a query over tables without rows, None where it has none."""
    try:
        row = database.execute("SELECT json_serialize_plan(?, optimize := true)", [query])
        [(text,)] = row.fetchall()
    except duckdb.Error:
        return None  # running the query itself says what is wrong with it
    planned = json.loads(text)
    return None if planned["error"] else planned["plans"][0]


def prepare(database: duckdb.DuckDBPyConnection, views: str) -> None:
    """Create all tables without rows, and the views, in a database for `plan`."""
    for table in TABLES.values():
        database.from_arrow(table.schema.empty_table()).create(table.name)
    database.execute(views)
    passes = {name for (name,) in database.execute("FROM duckdb_optimizers()").fetchall()}
    database.execute(f"SET GLOBAL disabled_optimizers = '{','.join(sorted(passes - _PASSES))}'")


def _indexed(rows: lance.LanceDataset) -> set[str]:
    """Return the columns in which values are found by an index, which only a large table has."""
    trees = (i for i in rows.describe_indices() if i.index_type == "BTree")
    return {column for index in trees for column in index.field_names}


class _Reading:
    """What the plan of a query reads of which table."""

    def __init__(self, plan: Node, tables: Mapping[str, lance.LanceDataset]) -> None:
        self._plan, self._tables = plan, tables
        self._found: dict[str, pc.Expression] = {}

    def filters(self) -> dict[str, pc.Expression]:
        """Return a condition for each table that need not be read whole.

        A table is scanned wherever the query names it, so each scan must have its own condition,
        and a row is read that one of them wants. Each new condition may lead to others: from the
        rows of a step to their experiences, from those to their scores.
        """
        while any(self._try(name) for name in self._scans if name not in self._found):
            pass
        return self._found

    def _try(self, name: str) -> bool:
        if name not in self._tables or not (indexed := _indexed(self._tables[name])):
            return False
        terms = [self._by_join(scan, indexed) for scan in self._scans[name]]
        if all(term is None for term in terms):
            return False  # DuckDB hands over conditions with constants by itself
        whole = [
            self._constants(scan) if term is None else term
            for scan, term in zip(self._scans[name], terms, strict=True)
        ]
        known = [term for term in whole if term is not None]
        if len(known) < len(whole):
            return False
        self._found[name] = reduce(operator.or_, known)
        return True

    def _by_join(self, scan: Node, indexed: set[str]) -> pc.Expression | None:
        """Return which rows of a scan the joins can match."""
        most = min(_MOST, self._tables[_name(scan)].count_rows() // _SHARE)
        for match in self._matches.get(id(scan), []):
            values = self._values(match, most) if match.column in indexed else None
            if values is not None:
                return pc.field(match.column).isin(values)
        return None

    def _values(self, match: _Match, most: int) -> pa.Array | None:
        """Return all values that a join can compare with; None if they are many or take long."""
        rows = self._tables.get(_name(match.source))
        only = self._limited(match.source)
        if rows is None or only is None or match.source_column not in rows.schema.names:
            return None
        found = rows.to_table(columns=[match.source_column], filter=only, limit=most + 1)
        values = found.column(0).unique()
        if len(found) > most or (match.null_matches and values.null_count):
            return None
        return values.drop_null()

    def _limited(self, scan: Node) -> pc.Expression | None:
        """Return a condition on a scan that is fast to read with."""
        name = _name(scan)
        terms = [t for t in (self._found.get(name), self._constants(scan)) if t is not None]
        rows = self._tables.get(name)
        if rows is None or not terms:
            return None
        if name not in self._found and rows.count_rows() > _SMALL:
            compared = {column for column, _ in _compared(scan)}
            if not compared & _indexed(rows):
                return None
        return reduce(operator.and_, terms)

    @staticmethod
    def _constants(scan: Node) -> pc.Expression | None:
        """Return the comparisons with constants that all rows of a scan satisfy."""
        terms = [term for _, term in _compared(scan)]
        return reduce(operator.and_, terms) if terms else None

    @cached_property
    def _scans(self) -> dict[str, list[Node]]:
        found: dict[str, list[Node]] = {}
        for node in _walk(self._plan):
            if node["type"] == "LOGICAL_GET":
                found.setdefault(_name(node), []).append(node)
        return found

    @cached_property
    def _matches(self) -> dict[int, list[_Match]]:
        """The matches of each scan, by the identity of its node."""
        found: dict[int, list[_Match]] = {}
        for join in _walk(self._plan):
            if join["type"] != "LOGICAL_COMPARISON_JOIN":
                continue
            left, right = join["children"]
            for condition in join["conditions"]:
                null_matches = condition.get("comparison") == "COMPARE_NOT_DISTINCT_FROM"
                if condition.get("comparison") != "COMPARE_EQUAL" and not null_matches:
                    continue
                a, b = (
                    _origin(side, condition[which]["index"])
                    if condition[which]["type"] == "BOUND_REF"
                    else None
                    for side, which in ((left, "left"), (right, "right"))
                )
                if a is None or b is None:
                    continue
                if join["join_type"] in _LEFT_MATCHES:
                    found.setdefault(id(a[0]), []).append(_Match(a[1], *b, null_matches))
                if join["join_type"] in _RIGHT_MATCHES:
                    found.setdefault(id(b[0]), []).append(_Match(b[1], *a, null_matches))
        return found


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node["children"]:
        yield from _walk(child)


def _name(scan: Node) -> str:
    """Return the table of a scan, empty where it is none of ours."""
    return (scan.get("function_data") or {}).get("table") or ""


def _origin(node: Node, i: int) -> tuple[Node, str] | None:
    """Return the scan and the column that output i of a node was read from.

    None where it is computed, or where the rows that have one value in it decide about others: then
    leaving some out would change more than those.
    """
    while True:
        kind, children = node["type"], node["children"]
        match kind:
            case "LOGICAL_GET":
                places = node["projection_ids"] or range(len(node["column_indexes"]))
                place = node["column_indexes"][places[i]]
                return (node, node["names"][place["index"]]) if place["has_index"] else None
            case "LOGICAL_PROJECTION":
                i = _referred(node["expressions"][i])
            case "LOGICAL_FILTER":
                i = node["projection_map"][i] if node["projection_map"] else i
            case "LOGICAL_AGGREGATE_AND_GROUP_BY":
                if len(node["grouping_sets"]) > 1 or i >= len(node["groups"]):
                    return None
                i = _referred(node["groups"][i])
            case "LOGICAL_DISTINCT":
                if node["distinct_type"] != "DISTINCT":
                    return None
            case "LOGICAL_WINDOW":
                windows = [map(_referred, e["partitions"]) for e in node["expressions"]]
                if not all(i in parts for parts in windows):
                    return None
            case "LOGICAL_COMPARISON_JOIN":
                width = len(node["left_projection_map"]) or _width(children[0])
                if width is None or node["join_type"] not in _LEFT_STAYS:
                    return None
                if i >= width and node["join_type"] != "INNER":
                    return None
                side = int(i >= width)
                i -= side * width
                kept = node[("left_projection_map", "right_projection_map")[side]]
                i, node = kept[i] if kept else i, children[side]
                continue
            case _:
                return None
        if i < 0:
            return None
        node = children[0]


def _referred(expression: Node) -> int:
    """Return which output of the node below an expression is; -1 where it is computed."""
    return expression["index"] if expression["type"] == "BOUND_REF" else -1


def _width(node: Node) -> int | None:
    """Return how many columns a node gives, None where it is not known."""
    match node["type"]:
        case "LOGICAL_GET":
            return len(node["projection_ids"] or node["column_indexes"])
        case "LOGICAL_PROJECTION":
            return len(node["expressions"])
        case "LOGICAL_AGGREGATE_AND_GROUP_BY":
            return len(node["groups"]) + len(node["expressions"]) + len(node["grouping_functions"])
        case "LOGICAL_FILTER" if node["projection_map"]:
            return len(node["projection_map"])
        case "LOGICAL_FILTER" | "LOGICAL_DISTINCT":
            return _width(node["children"][0])
        case "LOGICAL_WINDOW":
            below = _width(node["children"][0])
            return None if below is None else below + len(node["expressions"])
        case "LOGICAL_COMPARISON_JOIN":
            kept = [
                len(node[f"{side}_projection_map"]) or _width(child)
                for side, child in zip(("left", "right"), node["children"], strict=True)
            ]
            left, right = kept
            if node["join_type"] in {"SEMI", "ANTI"}:
                return left
            if node["join_type"] == "MARK":
                return None if left is None else left + 1
            return None if left is None or right is None else left + right
        case _:
            return None


def _compared(scan: Node) -> list[tuple[str, pc.Expression]]:
    """Return the columns that a scan compares with constants, and how."""
    if not scan.get("table_filters_by_projection"):
        return []
    found: list[tuple[str, pc.Expression]] = []
    for entry in scan["table_filters"]["filters"]:
        place = scan["column_indexes"][entry["key"]]
        if place["has_index"]:
            name = scan["names"][place["index"]]
            found += [(name, term) for term in _terms(pc.field(name), entry["value"])]
    return found


def _terms(column: pc.Expression, given: Node) -> Iterator[pc.Expression]:
    match given["filter_type"]:
        case "LEGACY_CONSTANT_COMPARISON":
            compare = _COMPARISONS.get(given["comparison_type"])
            if compare and _is_plain(given["constant"]):
                yield compare(column, given["constant"]["value"])
        case "LEGACY_IN_FILTER":
            if all(map(_is_plain, given["values"])):
                yield column.isin([value["value"] for value in given["values"]])
        case "LEGACY_CONJUNCTION_AND":
            for child in given["child_filters"]:
                yield from _terms(column, child)
        case "LEGACY_OPTIONAL_FILTER" if given["child_filter"]:
            yield from _terms(column, given["child_filter"])
        case _:
            pass  # fewer conditions: more rows


def _is_plain(constant: Node) -> bool:
    """Return whether a constant compares in Lance as it does in DuckDB."""
    return constant["type"]["id"] in {"VARCHAR", "BIGINT"} and not constant["is_null"]
