"""Retention: standing rules, in SQL, of which rows may be forgotten; each row that goes is listed.

A row goes in two commits: first it is listed in `drops`, then it is deleted. After a kill in
between, the next `maintain` finds it again, and lists it no second time. Snapshots and versions
within the grace period still show it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from ..append import WritableTables
from ..errors import ConfigError, NotFoundError, QueryError, nearest
from ..ids import content_id
from ..locks import locked
from ..query import QuerySession, columns_of, query_error
from ..schema import TABLES, table
from ..tables import Tables
from .report import Forgotten

TABLES_WITH_RULES = ("experiences", "scores", "experience_values", "embeddings")
"""Tables whose rows may go: each names an experience, which `drops` can list."""
ABANDONED_DAYS = 30
"""A run that did not end, and of which nothing came for so long, counts as ended."""

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
) > now() - INTERVAL {ABANDONED_DAYS} DAY
"""


@dataclass(frozen=True)
class Rule:
    """Rows of `table` for which `where` holds may be forgotten."""

    name: str
    table: str
    where: str
    note: str | None = None

    @property
    def reason(self) -> str:
        """What `drops` gives as the reason."""
        return f"{self.name}: {self.table} where {self.where}"

    @property
    def lineage_id(self) -> str:
        """The same for each time that the rule is applied, so that no row is listed twice."""
        return f"retention/{self.name}/{content_id(self.table, self.where)}"


def current(store: Tables) -> dict[str, Rule]:
    """Return the rules that stand, by name."""
    rules: dict[str, Rule] = {}
    rows = store.scan("retention").collect().sort("created_at", maintain_order=True)
    for row in rows.to_dicts():
        rules.pop(row["name"], None)
        if not row["is_dropped"]:
            rules[row["name"]] = Rule(row["name"], row["table_name"], row["where"], row["note"])
    return rules


def add(
    store: WritableTables, name: str, *, table: str, where: str, note: str | None = None
) -> Rule:
    """Let a rule stand from now on; the next `maintain` applies it.

    Raises ConfigError for a name that is taken or a table whose rows stay, QueryError for a
    condition that is not one.
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
    """Take a rule back; what it deleted stays deleted."""
    rules = current(store)
    if name not in rules:
        raise NotFoundError(f"there is no retention rule `{name}`{nearest(name, rules)}")
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
    what = f"`where` {rule.where!r}"
    found = console.sql(f"SELECT ({rule.where}\n) FROM {rule.table}", what=what)
    if str(found.types[0]) != "BOOLEAN":
        raise QueryError(
            f"`where` must be true or false, got {str(found.types[0]).lower()} from {rule.where!r}"
        )
    # as a column it might count or rank the rows that happen to be read together
    console.sql(f"SELECT 1 FROM {rule.table} WHERE ({rule.where}\n)", what=what)


def apply(store: WritableTables, *, dry_run: bool = False) -> tuple[Forgotten, ...]:
    """Forget the rows that the standing rules name, or count them; rows of unfinished runs stay."""
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
    with locked(store, rule.table):
        store.open_at(rule.table).delete(f"_rowid IN ({row_ids})")


def _found(store: Tables, rule: Rule) -> Iterator[pa.Table]:
    """Yield the rows that a rule names, a bounded number at a time, and which must be kept."""
    versions = store.versions()
    console = QuerySession()
    console.show(versions, store.open_at)
    what = f"rule `{rule.name}`"
    unfinished = console.sql(_UNFINISHED, what=what).to_arrow_table()
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
    """Return the SQL that tells which rows an unfinished run may need."""
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
