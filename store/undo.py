"""Undo and redo: take back everything that an import or a pipeline run added, or put it back.

Stored rows do not change: `withdrawals` lists the lineages whose rows do not count, and `members`
the rows that count although the lineage that stored them first was taken back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from .errors import NotFoundError, QueryError, nearest
from .query import literal
from .schema import TABLES
from .store import Store
from .withdrawals import is_gone, kept, row_id, taken_back

STAMPED = tuple(
    name
    for name, table in TABLES.items()
    if "lineage_id" in table.names and name not in ("lineage", "drops", "operator_errors")
    if name not in ("expectations", "members", "withdrawals")
)
"""Tables whose rows say which import or pipeline run added them."""


@dataclass(frozen=True)
class Undone:
    """What was taken back, or put back."""

    lineage_id: str
    name: str
    """The pipeline's name, or the import's file."""
    rows: dict[str, int] = field(default_factory=dict)
    """Of each table, its rows that do not count any more, or count again."""
    shared: dict[str, int] = field(default_factory=dict)
    """Of each table, its rows that count all the same, as another gave them too."""
    others: tuple[str, ...] = ()
    """What it had replaced, and is put back; or taken back again, when it is put back."""
    num_drawn: int = 0
    """Experiences among these that were trained on."""


def undo(store: Store, lineage_id: str) -> Undone:
    """Take back what one import or pipeline run added, and put back what it had replaced.

    Raises NotFoundError for one that is not there, QueryError when there is nothing to take back.
    """
    name, rows = _name(store, lineage_id), _rows(store, lineage_id)
    states = _states(store)
    if states.get(lineage_id, (False, None))[0]:
        by = states[lineage_id][1]
        how = f"was replaced by `{by}`" if by else "was taken back before"
        raise QueryError(f"`{lineage_id}` {how}: its rows do not count; `rlake redo` puts it back")
    others = _replaced(states, lineage_id, is_withdrawn=True)
    if not rows and not others:
        raise QueryError(
            f"no row says that `{lineage_id}` added it: it found all there already, or an older "
            "rlake stored them"
        )
    before = _current(store, rows)
    # one append: readers never see both, or neither, of a lineage and what it replaced
    _say(store, {lineage_id: (True, None), **dict.fromkeys(others, (False, lineage_id))})
    now = _current(store, rows)
    shared = {table: n for table, n in now.items() if n}
    return Undone(lineage_id, name, _changed(before, now), shared, others, _num_drawn(store, rows))


def redo(store: Store, lineage_id: str) -> Undone:
    """Put back what `undo` took back, or another replaced; raises as `undo` does."""
    name, rows = _name(store, lineage_id), _rows(store, lineage_id)
    states = _states(store)
    if not states.get(lineage_id, (False, None))[0]:
        raise QueryError(f"`{lineage_id}` was not taken back: its rows count")
    others = _replaced(states, lineage_id, is_withdrawn=False)
    before = _current(store, rows)
    _say(store, {lineage_id: (False, None), **dict.fromkeys(others, (True, lineage_id))})
    again = _changed(before, _current(store, rows))
    return Undone(lineage_id, name, again, {}, others, _num_drawn(store, rows))


def replace(store: Store, lineage_ids: Iterable[str], *, by: str) -> None:
    """Take back what was added under some lineages, since another was made in their place."""
    _say(store, {one: (True, by) for one in lineage_ids if one != by})


def standing(store: Store, name: str, *, sink: str) -> list[str]:
    """Return the lineages of that name, or that id, which wrote to a table and count."""
    wanted = literal(name)
    found = store.sql(
        "SELECT DISTINCT lineage_id, created_at FROM lineage WHERE "
        f"(lineage_id = {wanted} OR ((pipeline = {wanted} OR (pipeline = 'import' AND "
        f"source = {literal(f'file {name}')})) AND "
        f"regexp_replace(sink, '^table |, replaced$', '', 'g') = {literal(sink)})) "
        "AND lineage_id NOT IN (SELECT lineage_id FROM withdrawn) ORDER BY created_at"
    ).fetchall()
    return [row[0] for row in found]


def also_gave(store: Store, lineage_id: str, table: str, ids: pl.Series) -> int:
    """Note which of a lineage's rows were stored before: they are its own too; return how many."""
    own = store.scan(table).filter(pl.col("lineage_id") == lineage_id).select(row_id(table))
    # A writer may name a row twice, and each row is a member once.
    ids = ids.unique(maintain_order=True)
    again = ids.filter(~ids.is_in(own.collect().to_series().implode()))
    if len(again):
        named = {"lineage_id": pl.lit(lineage_id), "table_name": pl.lit(table)}
        store.append("members", again.alias("row_id").to_frame().with_columns(**named))
    return len(again)


def are_gone(store: Store, table: str, ids: pl.Series) -> bool:
    """Return whether some of these rows of a table were taken back."""
    gone = taken_back(store.scan("withdrawals").collect())
    if not gone:
        return False
    both = kept(store.scan("members").collect(), table, gone)
    found = store.scan(table).filter(is_gone(table, gone, both)).select(row_id(table))
    return bool(found.collect().to_series().is_in(ids.implode()).any())


_States = dict[str, tuple[bool, str | None]]
"""Of each lineage: whether it is taken back, and by which it was replaced."""


def _states(store: Store) -> _States:
    # by time: of several rows of a lineage the last one counts
    rows = store.scan("withdrawals").sort("created_at").collect().rows(named=True)
    return {row["lineage_id"]: (row["is_withdrawn"], row["replaced_by"]) for row in rows}


def _replaced(states: _States, by: str, *, is_withdrawn: bool) -> tuple[str, ...]:
    return tuple(one for one, state in states.items() if state == (is_withdrawn, by))


def _say(store: Store, states: Mapping[str, tuple[bool, str | None]]) -> None:
    rows = [
        {"lineage_id": one, "is_withdrawn": is_withdrawn, "replaced_by": by}
        for one, (is_withdrawn, by) in states.items()
    ]
    if rows:
        store.append("withdrawals", rows)


def _name(store: Store, lineage_id: str) -> str:
    found = store.sql(
        "SELECT CASE WHEN pipeline = 'import' THEN substr(source, 6) ELSE pipeline END "
        f"FROM lineage WHERE lineage_id = {literal(lineage_id)}"
    ).fetchall()
    if found:
        return found[0][0]
    if _rows(store, lineage_id):
        return "one that was killed before it was done"
    known = [row[0] for row in store.sql("SELECT lineage_id FROM lineage").fetchall()]
    raise NotFoundError(
        f"no import or pipeline run `{lineage_id}`{nearest(lineage_id, known)}; "
        '`rlake sql "SELECT lineage_id, pipeline, source, created_at FROM lineage"` lists them'
    )


def _rows(store: Store, lineage_id: str) -> dict[str, pl.Series]:
    """Return the ids of the rows that a lineage gave, by table."""
    found: dict[str, pl.Series] = {}
    given = store.scan("members").filter(pl.col("lineage_id") == lineage_id)
    members = given.select("table_name", "row_id").collect()
    for name in STAMPED:
        own = store.scan(name).filter(pl.col("lineage_id") == lineage_id).select(row_id(name))
        ids = own.collect().to_series()
        # A row may bear the lineage's own stamp and be noted as its member too.
        ids = pl.concat([ids, members.filter(pl.col("table_name") == name)["row_id"]]).unique()
        if len(ids):
            found[name] = ids
    return found


def _current(store: Store, rows: dict[str, pl.Series]) -> dict[str, int]:
    """Return how many of these rows count, by table."""
    counts = {}
    for name, ids in rows.items():
        key = ", ".join(TABLES[name].key)
        found: Any = store.sql(
            f"SELECT row_id FROM makers WHERE table_name = {literal(name)} AND is_current "
            f"UNION ALL SELECT concat_ws(' ', {key}) FROM {name} WHERE lineage_id IS NULL"
        ).pl()["row_id"]
        counts[name] = int(ids.is_in(found.implode()).sum())
    return counts


def _changed(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    return {table: abs(now[table] - n) for table, n in before.items() if now[table] != n}


def _num_drawn(store: Store, rows: dict[str, pl.Series]) -> int:
    drawn = store.scan("draws").select("experience_id").unique().collect().to_series()
    ids = rows.get("experiences", drawn[:0])
    return int(ids.is_in(drawn.implode()).sum())
