"""Check expectations of rows, record what was found, and stop what would read rows that fail."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import polars as pl

from ..store import Store
from ..store.errors import ConfigError, JobError, QueryError, counted
from ..store.ids import content_id
from ..store.query import QuerySession, query_error
from ..store.records import now
from ..store.schema import TABLES
from .expectation import IDS, Expectation

SAMPLE = 5
"""Failing rows whose ids are stored and named in errors."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What one expectation found."""

    expectation: Expectation
    num_rows: int
    num_failing: int
    row_ids: tuple[str, ...]
    """Ids of the first failing rows, or the first values of what SQL returned."""

    @property
    def passed(self) -> bool:
        """Whether no row fails."""
        return self.num_failing == 0

    def says(self, checked: str) -> str:
        """Return what failed as a clause: which rows, of how many."""
        of = f"`{self.expectation}` fails for {checked}"
        if self.expectation.kind in ("freshness", "row_count"):
            return f"{of}, which has {counted(self.num_rows, 'row')}"
        such = f", such as {', '.join(f'`{i}`' for i in self.row_ids)}" if self.row_ids else ""
        return f"{of}: {self.num_failing:,} of {counted(self.num_rows, 'row')}{such}"


def check(
    store: Store,
    expectations: Sequence[Expectation],
    checked: str,
    *,
    rows: pl.DataFrame | None = None,
    select: str | None = None,
    past: Store | None = None,
    **ids: Any,
) -> list[Checked]:
    """Check expectations of the rows of a frame, or of a SELECT over the store, and record them.

    `checked` says what the rows are, such as ``the output of pipeline `clean` ``; `ids` are columns
    of the table `expectations`: lineage_id, or run_id, attempt and step. A SELECT reads `past`, if
    given. Raises QueryError for an expectation that cannot be evaluated. The results are stored,
    unless the store is a past state.
    """
    found = [_checked(past or store, one, checked, rows, select) for one in expectations]
    # before an error is raised: what failed is on record
    # the past cannot be written to
    if found and not store.is_past:
        store.append("expectations", [_row(one, checked, ids) for one in found])
    return found


def enforce(found: Iterable[Checked], checked: str, *, stopped: str) -> list[str]:
    """Return a warning for each failure of severity warn; raise JobError for one of error.

    `stopped` says what does not happen now, such as `nothing was written`.
    """
    failed = [one for one in found if not one.passed]
    errors = [one.says(checked) for one in failed if one.expectation.severity == "error"]
    if errors:
        raise JobError(
            f"{'; '.join(errors)}; {stopped}: fix the rows, or set `severity: warn` (all results "
            "are in the table `expectations`)"
        )
    return [one.says(checked) for one in failed]


def bind(expectations: Sequence[Expectation], schema: pl.Schema, where: str) -> None:
    """Raise ConfigError when one names a column that the rows do not have, or does not parse."""
    console = QuerySession()
    # SQL may join any table: empty ones are enough to find what does not parse
    console.show(dict.fromkeys(TABLES, 1), lambda name, _: TABLES[name].schema.empty_table())
    console.put("rows", pl.DataFrame(schema=schema).to_arrow())
    for one in expectations:
        try:
            console.sql(_whole(one, list(schema), "", None), what=f"`{one}`")
        except ValueError as error:
            raise ConfigError(f"`{where}`: {error}") from error


def build(given: Any, where: str) -> tuple[Expectation, ...]:
    """Return expectations from plain values; raises ConfigError, with `where`, for wrong ones."""
    if not isinstance(given, list | tuple):
        raise ConfigError(f"`{where}` must be a list of expectations, got {given!r}")
    made = []
    for place, one in enumerate(given):
        try:
            made.append(Expectation.model_validate(one))
        except ValueError as error:
            first: Any = getattr(error, "errors", list)()
            message = first[0]["msg"].removeprefix("Value error, ") if first else str(error)
            inner = "".join(f".{part}" for part in first[0]["loc"] if first)
            raise ConfigError(f"`{where}.{place}{inner}`: {message}, got {one!r}") from error
    return tuple(made)


def _checked(
    store: Store, one: Expectation, checked: str, rows: pl.DataFrame | None, select: str | None
) -> Checked:
    what = f"`{one}`"
    try:
        if rows is None:
            assert select is not None, "rows are given, or a SELECT of them"
            columns = store.sql(f"SELECT * FROM ({select}\n) LIMIT 0").columns
            found = store.sql(_whole(one, columns, checked, select))
        else:
            found = store.sql(_whole(one, rows.columns, checked, None), rows=rows)
        table = found.to_arrow_table()
    except duckdb.Error as error:
        raise query_error(error, what) from error
    except QueryError as error:
        raise QueryError(f"{what}: {error}") from error
    num_rows, num_failing = (table.column(i)[0].as_py() for i in (0, 1))
    failing = num_failing or 0
    names = table.column_names[2:]
    # by its place: a column of the user's SELECT may have the name of one of ours
    place = next((names.index(name) for name in ("row_id", *IDS) if name in names), 0)
    ids = [str(value) for value in table.column(2 + place).to_pylist() if value is not None]
    return Checked(
        expectation=one,
        num_rows=num_rows,
        num_failing=failing,
        row_ids=tuple(ids if failing else ()),
    )


def _whole(one: Expectation, columns: Sequence[str], checked: str, select: str | None) -> str:
    """Return one query: how many rows there are, how many fail, and the first of them."""
    failing = one.query(columns, checked)
    rows = "" if select is None else f"WITH rows AS ({select}\n) "
    # the number that the next check compares with is of the same rows
    of = one.rows if one.kind == "row_count" else "rows"
    return (
        f"{rows}SELECT n.num_rows, f.* FROM (SELECT count(*) AS num_rows FROM {of}) n LEFT JOIN "
        f"(SELECT count(*) OVER () AS num_failing, * FROM ({failing}\n) ORDER BY ALL "
        f"LIMIT {SAMPLE}) f ON true"
    )


def _row(one: Checked, checked: str, ids: Mapping[str, Any]) -> dict[str, Any]:
    expectation, at = one.expectation, now()
    definition = expectation.model_dump(mode="json", exclude_none=True)
    return {
        "expectation_id": content_id(checked, definition, at.isoformat(), dict(ids)),
        "name": str(expectation),
        "checked": checked,
        "definition": json.dumps(definition, ensure_ascii=False),
        "severity": expectation.severity,
        "passed": one.passed,
        "num_rows": one.num_rows,
        "num_failing": one.num_failing,
        "row_ids": list(one.row_ids),
        "created_at": at,
        **ids,
    }
