"""An expectation: what must be true of rows, and the SQL query for the rows of which it is not."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..store.errors import QueryError, nearest
from ..store.query import literal, names_in, quoted

IDS = ("experience_id", "task_id", "preference_id", "feedback_id", "lineage_id", "run_id")
"""Columns by which a failing row is named: the first that the rows have."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")

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
    accepted_values: dict[str, tuple[str | bool | int | float, ...]] | None = None
    """By column, the values that it may have: `{finish_reason: [stop, length]}`; NULL passes."""
    range: dict[str, Bounds] | None = None
    """By column, its least and largest value: `{reward: [0, 1]}`; NULL passes, NaN does not."""
    freshness: dict[str, str] | None = None
    """By column of times, the largest age of the newest: `{created_at: 12h}` (s, m, h, d or w)."""
    group_size: tuple[int | None, int | None] | None = None
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
        # pydantic would not say which key is near
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

    @field_validator("not_null", "unique")
    @classmethod
    def _some(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if value is not None and not value:
            raise ValueError("expected one column or more, got none")
        return value

    @field_validator("range", "group_size")
    @classmethod
    def _ordered(cls, value: Any) -> Any:
        for low, high in value.values() if isinstance(value, dict) else [value or (None, None)]:
            bounds = [bound for bound in (low, high) if bound is not None]
            if any(math.isnan(bound) for bound in bounds) or bounds != sorted(bounds):
                raise ValueError(f"bounds are the least and the largest value, got {low}, {high}")
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
        read = {*IDS, *self._named(), *(names_in(self.where) if self.where else ())}
        return [name for name in known if name in read]

    def _named(self) -> list[str]:
        """Return the columns that it names."""
        if self.kind in ("group_size", "row_count", "sql"):
            return ["group_id"] if self.kind == "group_size" else []
        value = getattr(self, self.kind)
        return [value] if isinstance(value, str) else [*value]

    @property
    def rows(self) -> str:
        """SQL of the rows that it is about: those of `where`."""
        return f"(SELECT * FROM rows WHERE ({self.where}\n))" if self.where else "rows"

    def query(self, columns: Sequence[str], checked: str) -> str:
        """Return the SELECT over `rows` whose rows fail; its first column is their id, if any."""
        for name in self._named():
            if name not in columns:
                raise QueryError(f"the rows have no column `{name}`{nearest(name, columns)}")
        if self.sql is not None:
            return self.sql.strip().rstrip(";")
        key = next((name for name in IDS if name in columns), None)
        row_id = f"{quoted(key)}::VARCHAR AS row_id" if key else "NULL::VARCHAR AS row_id"
        fails = _FAILS[self.kind](self, f"{literal(checked)} AND name = {literal(str(self))}")
        if self.kind in ("freshness", "row_count"):
            whole = f"(SELECT {fails} AS fails FROM {self.rows})"
            return f"SELECT NULL::VARCHAR AS row_id FROM {whole} WHERE fails"
        # a WHERE cannot read windows
        clause = "QUALIFY" if self.kind in ("unique", "group_size") else "WHERE"
        return f"SELECT {row_id} FROM {self.rows} {clause} {fails}"


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
        # as text, which DuckDB casts: SQL has no literal of an infinite number
        parts += [f"{column} < '{low!r}'::DOUBLE"] if low is not None else []
        parts += [f"{column} > '{high!r}'::DOUBLE"] if high is not None else []
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
