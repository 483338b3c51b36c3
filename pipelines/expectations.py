"""Expectations: what must be true of rows, each one SQL query for the rows of which it is not."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import duckdb
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..store import Store
from ..store.errors import ConfigError, JobError, QueryError, counted, nearest
from ..store.ids import content_id
from ..store.query import QuerySession, literal, names_in, query_error, quoted
from ..store.records import now
from ..store.schema import TABLES

SAMPLE = 5
"""Failing rows whose ids are stored and named in errors."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_IDS = ("experience_id", "task_id", "preference_id", "feedback_id", "lineage_id", "run_id")

Bounds = tuple[float | None, float | None]
"""Least and largest value, both allowed; null: none."""


class RowCount(BaseModel):
    """How many rows there must be."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    min: int | None = None
    """At least this many."""
    max: int | None = None
    """At most this many."""
    change: float | None = Field(default=None, ge=0)
    """Largest change against the last time that this was checked and passed: 0.2 is a fifth."""


class Expectation(BaseModel):
    """What must be true of rows: exactly one kind, such as `{not_null: reward, severity: warn}`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    not_null: str | tuple[str, ...] | None = None
    """Columns that have a value in every row."""
    unique: str | tuple[str, ...] | None = None
    """Columns whose values together occur once; rows with a NULL in one are passed over."""
    accepted_values: dict[str, tuple[str | float | bool, ...]] | None = None
    """By column, the values that it may have: `{finish_reason: [stop, length]}`; NULL passes."""
    range: dict[str, Bounds] | None = None
    """By column, its least and largest value: `{reward: [0, 1]}`; NULL passes, NaN does not."""
    freshness: dict[str, str] | None = None
    """By column of times, the largest age of the newest: `{created_at: 12h}` (s, m, h, d or w)."""
    group_size: Bounds | None = None
    """Least and largest number of rows of each `group_id`."""
    row_count: RowCount | None = None
    """Number of rows: `{min: 100, change: 0.5}`."""
    sql: str | None = None
    """A SELECT that must return nothing; the rows are the table `rows`, others have their names."""
    where: str | None = None
    """SQL condition on the rows that are checked; others pass."""
    severity: Literal["warn", "error"] = "error"
    """error: what would read the rows is stopped; warn: it goes on, and prints a warning."""
    name: str | None = None
    """What it is called in messages and in the table `expectations`; null: its definition."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            for key in value:
                if key not in cls.model_fields:
                    raise ValueError(
                        f"an expectation has no key `{key}`{nearest(str(key), cls.model_fields)}"
                    )
        return value

    @model_validator(mode="after")
    def _one(self) -> Self:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            got = " and ".join(f"`{kind}`" for kind in kinds) or "none"
            raise ValueError(f"an expectation is one of {', '.join(KINDS)}, got {got}")
        if self.sql is not None and self.where is not None:
            raise ValueError("`where` is not for `sql`; write the condition into the SELECT")
        return self

    @field_validator("freshness")
    @classmethod
    def _ages(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        for age in (value or {}).values():
            if not _AGE.fullmatch(age.strip()):
                raise ValueError(
                    f"an age is a number and a unit, such as 30m, 12h or 7d, got {age!r}"
                )
        return value

    @property
    def kind(self) -> str:
        """The kind of the expectation."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    def __str__(self) -> str:
        """Return its name, or what it says."""
        if self.name is not None:
            return self.name
        said = self.model_dump(mode="json", include={self.kind, "where"}, exclude_none=True)
        of = said[self.kind]
        text = of if isinstance(of, str) else json.dumps(of, ensure_ascii=False)
        return f"{self.kind} {' '.join(text.split())}" + (
            f" where {self.where}" if self.where is not None else ""
        )

    def columns(self, known: Iterable[str]) -> list[str]:
        """Return the columns of rows that it reads, their ids included; SQL may read any."""
        known = list(known)
        if self.sql is not None:
            return known
        read = {*_IDS, *self._named(), *(names_in(self.where) if self.where else ())}
        return [name for name in known if name in read]

    def _named(self) -> list[str]:
        """Return the columns that it names."""
        if self.kind in ("group_size", "row_count", "sql"):
            return ["group_id"] if self.kind == "group_size" else []
        value = getattr(self, self.kind)
        return [value] if isinstance(value, str) else [*value]

    def query(self, columns: Sequence[str], checked: str) -> str:
        """Return the SELECT over `rows` whose rows fail; its first column is their id, if any."""
        for name in self._named():
            if name not in columns:
                raise QueryError(f"the rows have no column `{name}`{nearest(name, columns)}")
        if self.sql is not None:
            return self.sql.strip().rstrip(";")
        rows = f"(SELECT * FROM rows WHERE ({self.where}\n))" if self.where else "rows"
        key = next((name for name in _IDS if name in columns), None)
        row_id = f"{quoted(key)}::VARCHAR AS row_id" if key else "NULL::VARCHAR AS row_id"
        fails = _FAILS[self.kind](self, f"{literal(checked)} AND name = {literal(str(self))}")
        if self.kind in ("freshness", "row_count"):
            whole = f"(SELECT {fails} AS fails FROM {rows})"
            return f"SELECT NULL::VARCHAR AS row_id FROM {whole} WHERE fails"
        clause = "QUALIFY" if self.kind in ("unique", "group_size") else "WHERE"
        return f"SELECT {row_id} FROM {rows} {clause} {fails}"


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
    console.show(dict.fromkeys(TABLES, 1), lambda name, _: TABLES[name].schema.empty_table())
    console.put("rows", pl.DataFrame(schema=schema).to_arrow())
    for one in expectations:
        try:
            console.sql(_whole(one.query(list(schema), ""), None), what=f"`{one}`")
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
            found = store.sql(_whole(one.query(columns, checked), select))
        else:
            found = store.sql(_whole(one.query(rows.columns, checked), None), rows=rows)
        table = found.to_arrow_table()
    except duckdb.Error as error:
        raise query_error(error, what) from error
    except QueryError as error:
        raise QueryError(f"{what}: {error}") from error
    num_rows, num_failing = (table.column(i)[0].as_py() for i in (0, 1))
    failing = num_failing or 0
    names = table.column_names[2:]
    key = next((name for name in ("row_id", *_IDS) if name in names), names[0])
    ids = [str(value) for value in table.column(key).to_pylist() if value is not None]
    return Checked(
        expectation=one,
        num_rows=num_rows,
        num_failing=failing,
        row_ids=tuple(ids if failing else ()),
    )


def _whole(failing: str, select: str | None) -> str:
    """Return one query: how many rows there are, how many fail, and the first of them."""
    rows = "" if select is None else f"WITH rows AS ({select}\n) "
    return (
        f"{rows}SELECT n.num_rows, f.* FROM (SELECT count(*) AS num_rows FROM rows) n LEFT JOIN "
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


def _listed(value: str | tuple[str, ...] | None) -> list[str]:
    return [quoted(name) for name in ([value] if isinstance(value, str) else value or ())]


def _not_null(one: Expectation, _: str) -> str:
    return " OR ".join(f"{name} IS NULL" for name in _listed(one.not_null))


def _unique(one: Expectation, _: str) -> str:
    names = _listed(one.unique)
    known = " AND ".join(f"{name} IS NOT NULL" for name in names)
    return f"{known} AND count(*) OVER (PARTITION BY {', '.join(names)}) > 1"


def _accepted_values(one: Expectation, _: str) -> str:
    parts = []
    for name, values in (one.accepted_values or {}).items():
        texts = ", ".join(literal(v) if isinstance(v, str) else str(v) for v in values) or "NULL"
        column = quoted(name)
        parts.append(f"({column} IS NOT NULL AND coalesce({column} NOT IN ({texts}), true))")
    return " OR ".join(parts) or "false"


def _range(one: Expectation, _: str) -> str:
    parts = []
    for name, (low, high) in (one.range or {}).items():
        column = f"{quoted(name)}::DOUBLE"
        parts.append(f"isnan({column})")
        parts += [f"{column} < {low!r}"] if low is not None else []
        parts += [f"{column} > {high!r}"] if high is not None else []
    return f"coalesce({' OR '.join(parts) or 'false'}, false)"


def _freshness(one: Expectation, _: str) -> str:
    parts = []
    for name, age in (one.freshness or {}).items():
        number, unit = _AGE.fullmatch(age.strip()).groups()  # type: ignore[union-attr]
        oldest = f"now() - to_seconds({float(number) * _UNITS[unit]!r})"
        parts.append(f"coalesce(max({quoted(name)})::TIMESTAMPTZ < {oldest}, true)")
    return " OR ".join(parts) or "false"


def _group_size(one: Expectation, _: str) -> str:
    low, high = one.group_size or (None, None)
    size = "count(*) OVER (PARTITION BY group_id)"
    parts = [f"{size} < {low!r}"] if low is not None else []
    parts += [f"{size} > {high!r}"] if high is not None else []
    return " OR ".join(parts) or "false"


def _row_count(one: Expectation, last: str) -> str:
    wanted = one.row_count or RowCount()
    parts = ["false"]
    parts += [f"count(*) < {wanted.min}"] if wanted.min is not None else []
    parts += [f"count(*) > {wanted.max}"] if wanted.max is not None else []
    if wanted.change is not None:
        passed = f"expectations WHERE passed AND checked = {last}"
        before = f"(SELECT arg_max(num_rows, created_at) FROM {passed})"
        parts.append(f"coalesce(abs(count(*) - {before}) > {wanted.change!r} * {before}, false)")
    return " OR ".join(parts)


_FAILS = {
    "not_null": _not_null,
    "unique": _unique,
    "accepted_values": _accepted_values,
    "range": _range,
    "freshness": _freshness,
    "group_size": _group_size,
    "row_count": _row_count,
}
KINDS = (*_FAILS, "sql")
"""The kinds of expectations."""
