"""`@operator(kind)`: an operator from one function whose parameters are its configuration."""

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, get_args

import polars as pl

from ..store.errors import OperatorError, QueryError, nearest
from ..store.query import columns_of, names_in
from .apply import Operator
from .body import Batches, Body, Declared, Explained, PlainBody, Rows, Value
from .kinds import Kind
from .parameters import Parameters, jsonable
from .scope import Sees, sees_of
from .source_digest import users_code

P = ParamSpec("P")


class OperatorFunction(Generic[P]):
    """A function decorated with `@operator`; calling it with parameters builds the Operator."""

    def __init__(self, function: Callable[P, Body], **declared: Any) -> None:
        update_wrapper(self, function)
        self._function = function
        self.declared = declared
        """The arguments of `operator`."""
        self.name = function.__name__
        self.kind: Kind = declared["kind"]
        self.parameters = Parameters(function, self.name)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Operator:
        """Build the operator; raises OperatorError for parameters that do not fit."""
        values = self.parameters.bind(args, kwargs)
        made = self._function(**values)  # pyright: ignore[reportCallIssue]
        given = made if isinstance(made, Declared) else Declared(body=made)
        of_these = {n: getattr(given, n) for n in ("kind", "reads", "may_read", "writes", "scope")}
        declared = self.declared | {n: v for n, v in of_these.items() if v is not None}
        try:
            reads, rest = _reads(given.body, declared["reads"])
            group = "group" if declared["whole_groups"] else None
            scope = declared["scope"] or group or sees_of(given.body)
        except QueryError as error:
            raise OperatorError(f"operator `{self.name}`: {error}") from error
        declared |= {
            "reads": reads,
            "reads_all": rest or declared["reads_all"],
            "may_read": tuple(declared["may_read"]),
            "writes": _writes(given.body, declared["kind"], declared["writes"]),
            "scope": scope,
            "links": tuple(declared["links"]),
        }
        return Operator(
            name=self.name,
            params=jsonable(self.name, values),
            path=f"{self._function.__module__}:{self._function.__qualname__}",
            body=given.body,
            code=(*users_code(self._function, values.values()), *given.code),
            **declared,
        )


def operator(
    kind: Kind,
    *,
    version: int = 1,
    reads: Sequence[str] | None = None,
    reads_all: bool = False,
    may_read: Sequence[str] = (),
    writes: Sequence[str] | None = None,
    scope: Sees | None = None,
    whole_groups: bool = False,
    links: Sequence[str] = (),
    forgives: bool = False,
) -> Callable[[Callable[P, Body]], OperatorFunction[P]]:
    """Make an operator of a function; its parameters are the configuration, and are recorded.

    The function returns a Polars expression (or several), a function of the LazyFrame, an SQL text
    for DuckDB over the table `input`, an SQL `Value`, `Batches` or `Rows`; `Explained` adds the
    reason for dropped rows, `Declared` what depends on the parameters. A filter's body is true
    where a row is kept, or returns the rows kept, or all rows with the column `keep`. An augment's
    body returns only the new rows, with `parent_id`; their `run_id`, `batch` and `group_index`
    become NULL, since no run explored them. A reshape's body returns rows of another table, whose
    columns `links` hold the ids of the rows that they were made from.

    `scope` says what the result for a row depends on: that `row` alone, its `group`, or `all` rows.
    It decides how rows may be partitioned. It is inferred from expressions; for a function of the
    LazyFrame and for an SQL text it is `all` unless declared. `reads` are columns that must exist,
    `may_read` those that are read if they exist. With `forgives`, rows on which it failed still get
    values. `whole_groups` says that it computes over whole groups or, as a filter, never splits
    one.

    >>> @operator("filter")
    ... def short(*, limit: int = 10) -> pl.Expr:
    ...     return pl.col("response_text").str.len_chars() <= limit
    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "response_text": ["4", "four, I think"]})
    >>> rows.pipe(short(limit=5)).rows()
    [('a', '4')]
    """
    declared = dict(locals())  # first, so that it holds the parameters and nothing else
    if kind not in get_args(Kind):
        raise OperatorError(f"unknown kind `{kind}`{nearest(kind, get_args(Kind))}")
    return lambda function: OperatorFunction(function, **declared)


def _reads(body: PlainBody, declared: Sequence[str] | None) -> tuple[tuple[str, ...], bool]:
    """Return the columns that a body reads, and whether it may read others."""
    if declared is not None:
        return tuple(declared), False
    body = body.rows if isinstance(body, Explained) else body
    if isinstance(body, Value):
        known = columns_of(body.sql)
        return tuple(sorted(known)), bool(names_in(body.sql) - known)
    several = list(body) if isinstance(body, Sequence) and not isinstance(body, str) else [body]
    expressions = [one for one in several if isinstance(one, pl.Expr)]
    if len(expressions) < len(several):
        return (), True
    return tuple(dict.fromkeys(n for one in expressions for n in one.meta.root_names())), False


def _writes(body: PlainBody, kind: Kind, declared: Sequence[str] | None) -> tuple[str, ...]:
    if declared is not None:
        return tuple(declared)
    if kind == "prioritize":
        return ("priority",)
    if kind in ("clean", "derive"):
        if isinstance(body, Batches | Rows):
            return tuple(body.columns)
        several = body if isinstance(body, Sequence) and not isinstance(body, str) else [body]
        return tuple(e.meta.output_name() for e in several if isinstance(e, pl.Expr))
    return ()
