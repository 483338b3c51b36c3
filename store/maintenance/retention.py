"""Retention rules: SQL conditions for rows that may be deleted; each deleted row is listed.

A row is deleted in two commits: first it is listed in `drops`, then it is deleted. After a kill in
between, the next `maintain` deletes it without listing it again. Snapshots and versions within the
grace period still have it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from ..append import WritableTables
from ..errors import ConfigError, NotFoundError, nearest
from ..ids import content_id
from ..locks import locked
from ..query import QuerySession, columns_of, query_error
from ..schema import TABLES, table
from ..tables import Tables, newest_named
from . import old_versions
from .report import Forgotten

TABLES_WITH_RULES = ("experiences", "scores", "experience_values", "embeddings")
"""Tables whose rows may be deleted: each row names an experience, which `drops` can list."""
ABANDONED_DAYS = 30
"""An unfinished run without new rows for this long counts as ended."""

_REFUSED = {
    "tasks": "experiences name its rows",
    "draws": "its rows prove what was trained on",
    "metrics": "its rows are small, and `drops` could not list them",
}
_ROWS_AT_ONCE = 16_384
_UNFINISHED = f"""
SELECT r.run_id FROM runs r WHERE r.job <> 'evaluate' GROUP BY r.run_id
HAVING bool_or(r.status <> 'done') AND greatest(
    max(r.created_at), (SELECT max(e.created_at) FROM experiences e WHERE e.run_id = r.run_id)
) > to_timestamp({{now}}) - INTERVAL {ABANDONED_DAYS} DAY
"""


@dataclass(frozen=True)
class Rule:
    """Rows of `table` for which `where` holds may be deleted."""

    name: str
    table: str
    where: str
    note: str | None = None

    @property
    def reason(self) -> str:
        """The reason that `drops` records."""
        return f"{self.name}: {self.table} where {self.where}"

    @property
    def lineage_id(self) -> str:
        """An id that is the same each time the rule is applied, so that no row is listed twice."""
        return f"retention/{self.name}/{content_id(self.table, self.where)}"


def current(store: Tables) -> dict[str, Rule]:
    """Return the current rules by name."""
    return {
        name: Rule(name, row["table_name"], row["where"], row["note"])
        for name, row in newest_named(store, "retention").items()
    }


def add(
    store: WritableTables, name: str, *, table: str, where: str, note: str | None = None
) -> Rule:
    """Add a rule; the next `maintain` applies it.

    Raises ConfigError for a name that is taken or a table whose rows are never deleted, QueryError
    for an invalid condition.
    """
    if not name.strip():
        raise ConfigError("a retention rule needs a name")
    if name in current(store):
        raise ConfigError(
            f"there is a rule `{name}` already; drop it first, or name this one otherwise"
        )
    rule = Rule(name, table, where, note)
    check(rule)
    row = {"name": name, "table_name": table, "where": where, "note": note, "is_dropped": False}
    store.append("retention", [row])
    return rule


def drop(store: WritableTables, name: str) -> None:
    """Remove a rule; rows that it deleted stay deleted."""
    rules = current(store)
    if name not in rules:
        raise NotFoundError(f"no retention rule is called `{name}`{nearest(name, rules)}")
    rule = rules[name]
    row = {"name": name, "table_name": rule.table, "where": rule.where, "is_dropped": True}
    store.append("retention", [row])


def check(rule: Rule) -> None:
    """Raise ConfigError or QueryError for a rule that cannot be applied."""
    table(rule.table)
    if rule.table not in TABLES_WITH_RULES:
        why = _REFUSED.get(rule.table, "it is the store's own record")
        one_of = ", ".join(f"`{n}`" for n in TABLES_WITH_RULES)
        raise ConfigError(f"rows of `{rule.table}` stay: {why}; rules are for {one_of}")
    columns_of(rule.where)  # one condition, and no more
    console = QuerySession()
    console.show(dict.fromkeys(TABLES, 1), lambda n, _: TABLES[n].schema.empty_table())
    console.check_condition(rule.where, rule.table)


def apply(store: WritableTables, *, dry_run: bool = False) -> tuple[Forgotten, ...]:
    """Delete the rows that the rules select, or count them; rows of unfinished runs are kept."""
    return tuple(_apply(store, rule, dry_run=dry_run) for rule in current(store).values())


def _apply(store: WritableTables, rule: Rule, *, dry_run: bool) -> Forgotten:
    deleted = kept = 0
    for found in _found(store, rule):
        going = found.filter(pc.invert(found.column("is_kept")))
        deleted, kept = deleted + len(going), kept + len(found) - len(going)
        if len(going) and not dry_run:
            _forget(store, rule, going)
    return Forgotten(rule.name, rule.table, deleted, kept)


def _forget(store: WritableTables, rule: Rule, rows: pa.Table) -> None:
    ids = pc.unique(rows.column("experience_id"))
    store.append(
        "drops",
        pa.table(
            {
                "lineage_id": pa.repeat(rule.lineage_id, len(ids)),
                "experience_id": ids,
                "operator": pa.repeat("retention", len(ids)),
                "reason": pa.repeat(rule.reason, len(ids)),
            }
        ),
    )
    row_ids = ", ".join(map(str, rows.column("_rowid").to_pylist()))
    # `drops` first: after a kill a row may be listed and still exist, but never be deleted unlisted
    with locked(store, rule.table):
        # by address: the condition may hold for rows that came since and are not in `drops`
        store.open_at(rule.table).delete(f"_rowid IN ({row_ids})")


def _found(store: Tables, rule: Rule) -> Iterator[pa.Table]:
    """Yield the rows that a rule selects, in batches, and which of them must be kept."""
    versions = store.versions()
    console = QuerySession()
    console.show(versions, store.open_at)
    what = f"rule `{rule.name}`"
    query = _UNFINISHED.format(now=old_versions.ago(store, 0))
    unfinished = console.sql(query, what=what).to_arrow_table()
    console.put("unfinished", unfinished)
    console.put("needed", _needed(console, unfinished) if rule.table != "experiences" else _NONE)
    for rows in _light_rows(store, rule, versions[rule.table]):
        console.put("new_rows", rows)
        query = (
            f"SELECT _rowid, experience_id, {_kept(rule.table)} AS is_kept "
            f"FROM new_rows AS {rule.table} WHERE ({rule.where}\n)"
        )
        try:
            yield console.sql(query, what=what).to_arrow_table()
        except duckdb.Error as error:
            raise query_error(error, what) from error


_NONE = pa.table({"experience_id": pa.array([], pa.string())})


def _kept(name: str) -> str:
    """Return the SQL condition for rows that an unfinished run may need."""
    of_run = "coalesce(run_id IN (SELECT run_id FROM unfinished), false)"
    of_experience = "experience_id IN (SELECT experience_id FROM needed)"
    return {"experiences": of_run, "experience_values": f"({of_run} OR {of_experience})"}.get(
        name, of_experience
    )


def _needed(console: QuerySession, unfinished: pa.Table) -> pa.Table:
    """Return the ids of the experiences of unfinished runs."""
    if not len(unfinished):
        return _NONE
    query = "SELECT experience_id FROM experiences WHERE run_id IN (SELECT run_id FROM unfinished)"
    return console.sql(query).to_arrow_table()


def _light_rows(store: Tables, rule: Rule, version: int) -> Iterator[pa.Table]:
    """Yield the columns of the table that a rule reads, with row ids."""
    run = {"run_id"} & set(TABLES[rule.table].names)
    columns: Sequence[str] = sorted(
        {"experience_id", *run, *columns_of(rule.where, table_name=rule.table)}
    )
    scanner = store.open_at(rule.table, version).scanner(
        columns=list(columns), with_row_id=True, batch_size=_ROWS_AT_ONCE
    )
    for batch in scanner.to_batches():
        yield pa.Table.from_batches([batch])
