"""Priorities: an SQL or Polars expression over the columns of a row."""

from collections.abc import Sequence

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa

from ..errors import QueryError, nearest, reason
from ..query import QuerySession, nodes, query_error, syntax
from ..schema import TABLES
from ..side_columns import SideColumn
from .filters import check_steady

DYNAMIC = ("age", "times_drawn")
"""Names in priorities whose values change from draw to draw."""


class Priority:
    """The expression that rows are weighted by.

    Raises QueryError for an expression that does not parse, names a missing column, is not a
    number, is not deterministic, or depends on more than one row.
    """

    def __init__(
        self,
        expression: str | pl.Expr,
        sides: Sequence[SideColumn] = (),
        *,
        table: str = "experiences",
    ) -> None:
        self._expression, self._table = expression, table
        self._what = f"`priority` {str(expression)!r}"
        self._console: QuerySession | None = None
        aliases = [side.alias for side in sides]
        facts = [name for name in TABLES[table].names if name not in aliases]
        names = self._names([*facts, *aliases, *DYNAMIC])
        self.facts = [name for name in facts if name in names]
        """The columns of the table that it reads."""
        self.sides = [side for side in sides if side.alias in names]
        """The side columns that it reads."""
        self.dynamic = [name for name in DYNAMIC if name in names]
        """The names of DYNAMIC that it reads."""
        self._check(facts, sides)

    def __str__(self) -> str:
        return self._what

    def of(self, rows: pa.Table) -> pl.Series:
        """Return the priority of each row as float64, NULL where it is NULL."""
        if isinstance(self._expression, str) and self._expression in rows.column_names:
            values = pl.Series(values=rows.column(self._expression))
        elif isinstance(self._expression, str):
            values = pl.Series(values=self._ask(rows, f"({self._expression}\n)::DOUBLE").column(0))
        else:
            values = self._select(self._expression, rows)
        return values.cast(pl.Float64)

    def check(self, values: pl.Series, allowed: np.ndarray) -> int | None:
        """Return the place of the first allowed row whose priority cannot be a weight, or None."""
        numbers = values.to_numpy()
        known = values.is_not_null().to_numpy()
        bad = np.flatnonzero(allowed & known & ~(np.isfinite(numbers) & (numbers >= 0)))
        return int(bad[0]) if len(bad) else None

    def refusal(self, key: str, value: float) -> QueryError:
        """Return the error for a row whose priority cannot be a weight."""
        return QueryError(
            f"{self._what} is {value} for {self._table.removesuffix('s')} `{key}`, expected a "
            "finite number of 0 or more; use NULL for what is not known"
        )

    def _names(self, known: Sequence[str]) -> set[str]:
        """Return the names that the expression reads."""
        if not isinstance(self._expression, str):
            return self._polars_names(self._expression, known)
        if self._expression in known:
            return {self._expression}
        if not self._expression.strip():
            raise QueryError("`priority` is empty, expected a column or an expression")
        tree = syntax(f"SELECT ({self._expression}\n) FROM {self._table}", what=self._what)
        found = list(nodes(tree["select_list"]))
        if any(node.get("class") == "SUBQUERY" for node in found):
            raise QueryError(
                f"{self._what} has a subquery, expected an expression over the columns of one "
                "row; join other tables by `with_columns`"
            )
        check_steady(tree, what=self._what)
        # lower case on both sides: SQL ignores the case of names
        named = {str(n).lower() for node in found for n in node.get("column_names", ())}
        return named & {name.lower() for name in known}

    def _polars_names(self, expression: pl.Expr, known: Sequence[str]) -> set[str]:
        names = expression.meta.root_names()
        for name in names:
            if name not in known:
                raise QueryError(
                    f"{self._what} names a column `{name}` that is not there{nearest(name, known)}"
                )
        meta = expression.meta
        if meta.has_multiple_outputs() or not (meta.is_row_separable() or meta.is_literal()):
            raise QueryError(
                f"{self._what} looks at more than one row or gives more than one column, expected "
                "one number a row"
            )
        return set(names)

    def _check(self, facts: Sequence[str], sides: Sequence[SideColumn]) -> None:
        """Evaluate it for no rows, which checks names and types."""
        schema = TABLES[self._table].schema
        fields = [schema.field(name) for name in facts]
        fields += [pa.field(s.alias, pa.string() if s.is_text else pa.float64()) for s in sides]
        fields += [pa.field(name, pa.int64()) for name in DYNAMIC]
        empty = pa.schema(fields).empty_table()
        if not isinstance(self._expression, str):
            kind = self._select(self._expression, empty).dtype
            is_number = kind.is_numeric()
        else:
            kind = self._ask(empty, f"({self._expression}\n)").column(0).type
            types = pa.types
            is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
            # WHERE refuses aggregates and windows, which would depend on which rows arrive together
            self._ask(empty, "1", where=f"WHERE ({self._expression}\n) IS NULL")
        if not is_number:
            raise QueryError(
                f"{self._what} must be a number, got {str(kind).lower()}; cast it, for example "
                "with `::DOUBLE`"
            )

    def _ask(self, rows: pa.Table, select: str, *, where: str = "") -> pa.Table:
        if self._console is None:
            self._console = QuerySession(views=False)
        self._console.put("new_rows", rows)
        query = f"SELECT {select} FROM new_rows AS {self._table} {where}"
        try:
            return self._console.sql(query, what=self._what).to_arrow_table()
        except duckdb.Error as error:
            raise query_error(error, self._what) from error

    def _select(self, expression: pl.Expr, rows: pa.Table) -> pl.Series:
        frame = pl.DataFrame(pl.from_arrow(rows))
        try:
            return frame.with_columns(expression.alias(_RESULT))[_RESULT]
        except pl.exceptions.PolarsError as error:
            raise QueryError(f"{self._what} is not valid: {reason(error)}") from error


_RESULT = "priority of the row"
