"""Side columns: values computed later for stored rows, joined to them when they are read."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from .changes import CREATED
from .errors import NotFoundError, QueryError, nearest
from .query import is_in, literal
from .schema import TABLES
from .schema_versions import scanned
from .tables import Tables
from .withdrawals import is_gone, kept, taken_back

REPLACEABLE = ("reward", "advantage", "priority")
"""Declared columns that a side column may replace, by its alias."""

_SPEC = re.compile(
    r"(?:(?P<alias>[^=:@]*)=)?(?P<kind>[^=:@]*):(?P<name>[^=@]+)(?:@(?P<version>.+))?"
)
_ALIAS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GRAMMAR = (
    "write `score:NAME@VERSION`, `feedback:score@ANNOTATOR`, `feedback:label@ANNOTATOR` or "
    "`derived:NAME@VERSION`, with or without `@...`, and `ALIAS=` before it to name it"
)
_TIES = {"scores": "scorer_version", "feedback": "feedback_id", "experience_values": "version"}
_NAMED_BY = {"scores": "scorer", "feedback": "annotator", "experience_values": "name"}
_WITHDRAWN = ("withdrawals", "members")
_STARTS = ("run_id", "attempt", "start_step")
_KINDS = {"scores": "score", "feedback": "feedback", "experience_values": "derived"}
_NOUNS = {"scores": "score", "feedback": "feedback", "experience_values": "derived value"}


@dataclass(frozen=True)
class SideColumn:
    """A column of values from a side table; the newest row of an experience counts."""

    alias: str
    """The name of the column."""
    table: str
    """scores, feedback or experience_values."""
    value: str
    """The column of that table: `value`; `score` or `label`; `value` or `text`."""
    filters: tuple[tuple[str, str], ...] = ()
    """Columns of that table and their required values, such as `("scorer", "strict")`."""

    def __str__(self) -> str:
        """Return the spec that `parse` accepts."""
        named, said = dict(self.filters), _NAMED_BY[self.table]
        name = self.value if self.table == "feedback" else named[said]
        version = named.get(said if self.table == "feedback" else self.tie)
        text = ".text" if self.value == "text" else ""
        at = f"@{version}" if version else ""
        return f"{self.alias}={_KINDS[self.table]}:{name}{text}{at}"

    @property
    def sql(self) -> str:
        """The SELECT of `experience_id` and the alias, one row per experience with a value.

        It reads a view without rows that were taken back, and without values that a superseded
        attempt of a trainer derived.
        """
        found = " AND ".join(f"{name} = {literal(v)}" for name, v in self.filters) or "true"
        rows = f"{self.table}_standing"
        if self.table == "feedback":
            found += f" AND {self.value} IS NOT NULL AND compared_id IS NULL"
        return (
            f"SELECT experience_id, arg_max_null({self.value}, (created_at, {self.tie})) "
            f'AS "{self.alias}" FROM {rows} WHERE {found} GROUP BY experience_id'
        )

    @property
    def tie(self) -> str:
        """The column that breaks ties between rows of the same time: the larger value counts."""
        return _TIES[self.table]

    @property
    def is_text(self) -> bool:
        """Whether its values are texts, not numbers."""
        return self.value in ("label", "text")

    @property
    def tables(self) -> set[str]:
        """The tables that its values depend on."""
        return {self.table, "job_events"} if self.table == "experience_values" else {self.table}

    @property
    def reads(self) -> list[str]:
        """The columns of the side table that determine the value, and which row counts."""
        names = ["experience_id", "created_at", self.value, self.tie]
        names += [name for name, _ in self.filters]
        names += ["run_id", "attempt", "step"] if self.table == "experience_values" else []
        names += ["compared_id"] if self.table == "feedback" else []
        return list(dict.fromkeys(names))

    @property
    def chosen(self) -> pl.Expr:
        """Whether a row of the side table is one of this column's."""
        wanted = [pl.col(name) == value for name, value in self.filters]
        if self.table == "feedback":  # comments and comparisons do not replace a label
            wanted += [pl.col(self.value).is_not_null(), pl.col("compared_id").is_null()]
        return pl.all_horizontal(*wanted, pl.lit(True))  # noqa: FBT003

    def latest(self, rows: pl.LazyFrame) -> pl.LazyFrame:
        """Return `experience_id` and the alias, from rows of the side table that count."""
        rows = rows.filter(self.chosen)
        # as `arg_max_null` in `sql`: the newest row counts, also where its value is NULL
        newest = pl.col(self.value).sort_by("created_at", self.tie).last()
        return rows.group_by("experience_id").agg(newest.alias(self.alias))


def parse(spec: str) -> SideColumn:
    """Return the side column of a spec.

    >>> parse("score:strict@2").filters
    (('scorer', 'strict'), ('scorer_version', '2'))
    >>> parse("reward=feedback:score").alias
    'reward'
    >>> parse("derived:topic.text").value
    'text'

    Without a version or annotator, the newest row of any counts. Raises QueryError for an invalid
    spec, and for a name that would hide a declared column: only reward, advantage and priority may
    be replaced, and only by an alias or a derived value of this name.
    """
    match = _SPEC.fullmatch(spec)
    makers = {"score": _score, "feedback": _feedback, "derived": _derived}
    if match is None or match["alias"] == "":
        raise QueryError(f"`{spec}` names no side column; {_GRAMMAR}")
    if match["kind"] not in makers:
        raise QueryError(
            f"`{spec}` names no side column: unknown kind `{match['kind']}`"
            f"{nearest(match['kind'], makers)}; {_GRAMMAR}"
        )
    table, value, filters, name = makers[match["kind"]](match["name"], match["version"])
    alias = match["alias"] or name
    is_said = match["alias"] is not None or table == "experience_values"
    _check_alias(spec, alias, value, is_said=is_said)
    return SideColumn(alias, table, value, tuple((k, v) for k, v in filters.items() if v))


def parse_all(specs: Iterable[str | SideColumn]) -> tuple[SideColumn, ...]:
    """Return the side columns of several specs, whose names must differ."""
    columns = tuple(parse(s) if isinstance(s, str) else s for s in specs)
    names = [c.alias for c in columns]
    for name in names:
        if names.count(name) > 1:
            raise QueryError(
                f"two side columns are called `{name}`; name one of them otherwise, "
                f"such as `{name}_2=...`"
            )
    return columns


_Parsed = tuple[str, str, Mapping[str, str | None], str]
"""Table, value, filters, and the alias when none is given."""


def _score(name: str, version: str | None) -> _Parsed:
    filters = {"scorer": name, "scorer_version": version}
    return "scores", "value", filters, name.rpartition(":")[2]


def _feedback(name: str, annotator: str | None) -> _Parsed:
    if name not in ("score", "label"):
        raise QueryError(
            f"feedback has a `score` and a `label`, got `{name}`"
            f"{nearest(name, ('score', 'label'))}; {_GRAMMAR}"
        )
    return "feedback", name, {"annotator": annotator}, name


def _derived(name: str, version: str | None) -> _Parsed:
    value = "text" if name.endswith(".text") else "value"
    name = name.removesuffix(".text")
    return "experience_values", value, {"name": name, "version": version}, name


def _check_alias(spec: str, alias: str, value: str, *, is_said: bool) -> None:
    if not _ALIAS.fullmatch(alias):
        raise QueryError(
            f"`{spec}` would make a column called `{alias}`; give it a name of letters, digits "
            "and `_`: `NAME=...`"
        )
    if alias.lower() not in TABLES["experiences"].names:  # SQL knows no capitals
        return
    if alias not in REPLACEABLE:
        raise QueryError(
            f"`{spec}` would hide the column `{alias}` of `experiences`; give it another name: "
            "`NAME=...`"
        )
    if not is_said:
        raise QueryError(
            f"`{spec}` would hide the column `{alias}` of `experiences`; if it is to stand in for "
            f"it, write `{alias}={spec}`, else give it another name"
        )
    if value in ("label", "text"):
        raise QueryError(f"`{alias}` is a number, and `{spec}` is text; take another value")


def from_sql(columns: Sequence[SideColumn], *, plain: str = "experiences_current") -> str:
    """Return a relation for FROM: current experiences with side columns; give it an alias.

    `plain` is the name of the table without them.

    >>> strict = from_sql([parse("reward=score:strict@2")])
    >>> store.sql(f"SELECT avg(reward) FROM {strict} AS experiences").fetchall()
    [(None,)]
    """
    if not columns:
        return plain
    hidden = [c.alias for c in columns if c.alias in TABLES["experiences"].names]
    facts = f"e.* EXCLUDE ({', '.join(hidden)})" if hidden else "e.*"
    values = ", ".join(f'side_{i}."{c.alias}"' for i, c in enumerate(columns))
    joins = " ".join(
        f"LEFT JOIN ({c.sql}) AS side_{i} ON e.experience_id = side_{i}.experience_id"
        for i, c in enumerate(columns)
    )
    return f"(SELECT {facts}, {values} FROM {plain} AS e {joins})"


def join(store: Tables, frame: pl.LazyFrame, columns: Sequence[SideColumn]) -> pl.LazyFrame:
    """Join side columns to a frame of experiences, keeping its rows, order and columns."""
    names = frame.collect_schema().names()
    hidden = [c.alias for c in columns if c.alias in names]
    joined = frame.drop(hidden)
    for column in columns:
        rows = _standing(store, column.table, store.scan(column.table), {})
        side = column.latest(rows)
        joined = joined.join(side, on="experience_id", how="left", maintain_order="left")
    return joined.select(*names, *(c.alias for c in columns if c.alias not in names))


def attach(
    store: Tables,
    rows: pl.DataFrame,
    columns: Sequence[SideColumn],
    *,
    until: Mapping[str, int] | None = None,
) -> pl.DataFrame:
    """Add side columns to a few hundred rows, by `experience_id`, in their order.

    Existing columns are replaced in place. Only rows of the side tables about these experiences are
    read, and of tables in `until` only those stored by that version.
    """
    wanted = is_in("experience_id", rows["experience_id"].unique().sort())
    until = until or {}
    for column in columns:
        names = [*dict.fromkeys([*column.reads, *TABLES[column.table].key, "lineage_id"])]
        stored = _stored_by(store, column.table, names, until, only=wanted)
        counting = _standing(store, column.table, stored, until)
        values = rows.select("experience_id").join(
            column.latest(counting).collect(), on="experience_id", how="left", maintain_order="left"
        )
        rows = rows.with_columns(values[column.alias])
    return rows


def _stored_by(
    store: Tables,
    table: str,
    columns: Sequence[str],
    until: Mapping[str, int],
    *,
    only: str | None = None,
) -> pl.LazyFrame:
    """Return the rows of a table that were stored by its version in `until`, or all rows."""
    read = list(dict.fromkeys([*columns, CREATED]))
    rows = pl.LazyFrame(pl.from_arrow(scanned(store.dataset(table), read, filter=only)))
    return rows.filter(pl.col(CREATED) <= until[table]) if table in until else rows


def check(store: Tables, columns: Sequence[SideColumn]) -> None:
    """Raise NotFoundError, with the nearest name, for a column without stored values."""
    for column in columns:
        wanted = " AND ".join(f"{name} = {literal(v)}" for name, v in column.filters)
        dataset = store.dataset(column.table)
        if dataset.scanner(filter=wanted or None, columns=["experience_id"], limit=1).to_table():
            continue
        raise _unknown(store, column)


def _unknown(store: Tables, column: SideColumn) -> NotFoundError:
    by, tie = _NAMED_BY[column.table], column.tie
    noun, wanted = _NOUNS[column.table], dict(column.filters)
    keys = [by, *(k for k in wanted if k != by)]
    stored = store.scan(column.table).select(keys).unique().collect()
    if not stored.height:
        past = " at this snapshot; take one after it is stored" if store.is_past else ""
        return NotFoundError(f"no {noun} is stored yet, and `{column.alias}` needs one{past}")
    name = wanted.get(by)
    if name is None or name not in stored[by]:
        return NotFoundError(f"no {noun} by `{name}`{nearest(str(name), stored[by].unique())}")
    versions = stored.filter(pl.col(by) == name)[tie]
    return NotFoundError(
        f"no {noun} by `{name}` of version `{wanted[tie]}`{nearest(wanted[tie], versions)}"
    )


def _standing(
    store: Tables, table: str, rows: pl.LazyFrame, until: Mapping[str, int]
) -> pl.LazyFrame:
    """Drop rows that were taken back, or that a superseded attempt of a trainer derived."""
    # `until` lacks these tables if nothing had been taken back at the time
    then = {**dict.fromkeys(_WITHDRAWN, 1), **until} if until else {}

    def rows_of(name: str) -> pl.DataFrame:
        return _stored_by(store, name, TABLES[name].names, then).collect()

    gone = taken_back(rows_of("withdrawals"))
    if gone:
        rows = rows.filter(~is_gone(table, gone, kept(rows_of("members"), table, gone)))
    if table != "experience_values":
        return rows
    starts = _stored_by(store, "job_events", _STARTS, until, only="job = 'train'")
    return without_superseded(rows, superseded_steps(starts))


def superseded_steps(starts: pl.LazyFrame) -> pl.LazyFrame:
    """Return (run_id, attempt, from_step) as the view does, from the starts of trainers."""
    starts = starts.select("run_id", "attempt", from_step="start_step").unique()
    return (
        starts.select("run_id", "attempt")
        .unique()
        .join(starts, on="run_id", suffix="_later")
        .filter(pl.col("attempt_later") > pl.col("attempt"))
        .group_by("run_id", "attempt")
        .agg(pl.col("from_step").min())
    )


def without_superseded(rows: pl.LazyFrame, superseded: pl.LazyFrame) -> pl.LazyFrame:
    """Drop rows of steps that a later attempt of their run repeated."""
    counts = pl.any_horizontal(
        pl.col("from_step").is_null(),
        pl.col("step").is_null(),
        pl.col("step") < pl.col("from_step"),
    )
    return rows.join(superseded, on=["run_id", "attempt"], how="left").filter(counts)


assert set(_TIES) <= set(TABLES), "side columns are of declared tables"
