"""`@operator(kind)`: an operator from one function whose parameters are its configuration."""

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, get_args

import polars as pl

from ..store.errors import OperatorError, QueryError, nearest
from ..store.query import columns_of, names_in
from .apply import Operator, Sees
from .body import Batches, Body, Declared, Explained, PlainBody, Rows, Value
from .kinds import Kind
from .parameters import Parameters, jsonable
from .scope import sees_of
from .source_digest import users_code

P = ParamSpec("P")


class OperatorFunction(Generic[P]):
    """A function under `@operator`: calling it with parameters builds the Operator."""

    def __init__(self, function: Callable[P, Body], **declared: Any) -> None:
        update_wrapper(self, function)
        self._function = function
        self._declared = declared
        self.name = function.__name__
        self.kind: Kind = declared["kind"]
        self.parameters = Parameters(function, self.name)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Operator:
        """Build the operator; raises OperatorError for parameters that do not fit."""
        values = self.parameters.bind(args, kwargs)
        made = self._function(**values)  # pyright: ignore[reportCallIssue]
        given = made if isinstance(made, Declared) else Declared(body=made)
        declared = dict(self._declared)
        for name in ("kind", "reads", "may_read", "writes", "scope"):
            if getattr(given, name) is not None:
                declared[name] = getattr(given, name)
        body, kind = given.body, declared["kind"]
        try:
            reads, rest = _reads(body, declared["reads"])
            scope = declared["scope"] or ("group" if declared["whole_groups"] else sees_of(body))
        except QueryError as error:
            raise OperatorError(f"operator `{self.name}`: {error}") from error
        return Operator(
            name=self.name,
            kind=kind,
            params=jsonable(self.name, values),
            path=f"{self._function.__module__}:{self._function.__qualname__}",
            version=declared["version"],
            body=body,
            reads=reads,
            reads_all=rest or declared["reads_all"],
            may_read=tuple(declared["may_read"]),
            forgives=declared["forgives"],
            writes=_writes(body, kind, declared["writes"]),
            scope=scope,
            whole_groups=declared["whole_groups"],
            links=declared["links"],
            code=users_code(self._function, values.values()),
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
    body returns the new rows only, with `parent_id`; their `run_id` and `step` become NULL, since
    no run explored them. A reshape's body returns rows of another table that name the rows they
    were made from in `links`.

    `scope` says what it looks at to treat a row: that `row` alone, its `group`, or `all` rows; that
    is how rows may be cut into parts. It is found out where the body tells, else it is `all` for a
    function of the LazyFrame and for an SQL text. `may_read` are columns that it reads where they
    are there, beside `reads`, which must be. One that `forgives` gives rows on which it failed
    their values all the same. `whole_groups` says that it computes over groups as a whole, or, as
    a filter, never cuts one.

    >>> @operator("filter")
    ... def short(*, limit: int = 10) -> pl.Expr:
    ...     return pl.col("response_text").str.len_chars() <= limit
    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "response_text": ["4", "four, I think"]})
    >>> rows.pipe(short(limit=5)).rows()
    [('a', '4')]
    """
    if kind not in get_args(Kind):
        raise OperatorError(f"there is no kind `{kind}`{nearest(kind, get_args(Kind))}")

    def decorate(function: Callable[P, Body]) -> OperatorFunction[P]:
        return OperatorFunction(
            function,
            kind=kind,
            version=version,
            reads=reads,
            reads_all=reads_all,
            may_read=may_read,
            forgives=forgives,
            writes=writes,
            scope=scope,
            whole_groups=whole_groups,
            links=tuple(links),
        )

    return decorate


def _reads(body: PlainBody, declared: Sequence[str] | None) -> tuple[tuple[str, ...], bool]:
    """Return the columns that a body reads, and whether it may read others."""
    if declared is not None:
        return tuple(declared), False
    body = body.rows if isinstance(body, Explained) else body
    if isinstance(body, Value):
        known = columns_of(body.sql)
        return tuple(sorted(known)), bool(names_in(body.sql) - known)
    several = list(body) if isinstance(body, Sequence) and not isinstance(body, str) else [body]
    found: dict[str, None] = {}
    for one in several:
        if not isinstance(one, pl.Expr):
            return (), True
        found.update(dict.fromkeys(one.meta.root_names()))
    return tuple(found), False


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
