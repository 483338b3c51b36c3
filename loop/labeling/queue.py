"""Labeling queues: the items that a query selects, and which of them each annotator has left.

The only state is the table `feedback`: nothing is locked or reserved, so annotators never wait for
each other, and training never waits for annotators.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl

from ...operators.statistics import seeded_uniform
from ...store import Store
from ...store.errors import ConfigError, NotFoundError
from ...store.query import columns_of, is_in, literal
from ...store.records import proper
from ...store.schema import TABLES
from .question import GOOD, PAIR, Choice, Question

Kind = Literal["disagreements", "borderline", "random"]
"""Built-in queries: rows with different opinions, rows of borderline groups, or random rows."""

ITEMS = 200
"""Default size of a queue."""


@dataclass(frozen=True)
class Item:
    """An experience to label, or two rollouts of a task to compare."""

    experience_id: str
    compared_id: str | None = None

    @property
    def key(self) -> str:
        """A text that identifies the item."""
        return f"{self.experience_id}|{self.compared_id or ''}"


@dataclass(frozen=True)
class Queue:
    """Items in the query's order, and the question about each."""

    name: str
    question: Question
    items: tuple[Item, ...]
    reviews: int = 1
    """How many people label each item."""

    @classmethod
    def chosen(
        cls,
        store: Store,
        *,
        name: str,
        question: Question = GOOD,
        kind: Kind = "random",
        sql: str | None = None,
        where: str | None = None,
        in_pairs: bool = False,
        reviews: int = 1,
        limit: int = ITEMS,
        seed: int = 0,
    ) -> "Queue":
        """Return a queue of the rows that a built-in query, or a SELECT of `experience_id`, gives.

        Items that already have a label stay in the queue, whatever the query returns now. Raises
        QueryError for a query that cannot run, ConfigError for one without `experience_id`, and
        NotFoundError for an empty queue.
        """
        columns_of(where or "true")  # raises where it is not a condition
        query = sql or _QUERIES[kind].format(where=where or "true", seed=literal(str(seed)))
        found = _chosen(store, query, in_pairs=in_pairs, limit=limit)
        begun = _begun(store, name)
        items = _stored(store, dict.fromkeys([*begun, *found]))[: max(limit, len(begun))]
        if not items:
            raise NotFoundError(
                f"queue `{name}` is empty: its query returns no experience; choose another query"
            )
        return cls(name, PAIR if in_pairs else question, items, reviews)

    def next(self, store: Store, annotator: str) -> Item | None:
        """Return the next item of an annotator; None when nothing is left.

        Items with all their reviews, those that this annotator labeled or skipped, and those whose
        rows were deleted are passed over. Items that lack the fewest reviews come first; among
        those, each annotator has another order, so that people who start together rarely meet.
        """
        reviews, mine = _reviews(store, self.name, annotator)
        left = [i for i in self.items if i not in mine and reviews.get(i, 0) < self.reviews]
        left = _stored(store, left)
        return min(left, key=lambda i: (-reviews.get(i, 0), _own(annotator, i)), default=None)

    def add(
        self, store: Store, item: Item, annotator: str, choice: Choice | None, *, comment: str = ""
    ) -> None:
        """Store a label; with None for `choice`, the annotator skips the item."""
        store.append("feedback", [_row(self.name, item, annotator, choice, comment)])

    def check(self, store: Store) -> None:
        """Raise ConfigError when the queue has stored labels that the question does not offer."""
        rows = store.sql(
            f"SELECT DISTINCT label FROM labels WHERE queue = {literal(self.name)} ORDER BY label"
        ).fetchall()
        known = [c.label for c in self.question.choices]
        strange = [label for (label,) in rows if label not in known]
        if strange:
            raise ConfigError(
                f"queue `{self.name}` has labels `{strange[0]}`, and this question offers "
                f"{', '.join(f'`{label}`' for label in known)}; give the same `--labels`, or "
                "another `--queue`"
            )

    def named(self, key: str) -> Item:
        """Return the item with a key; NotFoundError when the queue does not have it."""
        for item in self.items:
            if item.key == key:
                return item
        raise NotFoundError(f"queue `{self.name}` has no item `{key[:80]}`")


@dataclass(frozen=True)
class Progress:
    """Progress of a queue."""

    items: int
    done: int
    """Items with all their reviews."""
    labels: int
    mine: int
    """Items that this annotator labeled or skipped."""


def progress(queue: Queue, store: Store, annotator: str) -> Progress:
    """Return the progress of a queue, and one annotator's part in it."""
    reviews, mine = _reviews(store, queue.name, annotator)
    counts = [reviews.get(i, 0) for i in queue.items]
    done = sum(n >= queue.reviews for n in counts)
    return Progress(len(queue.items), done, sum(counts), len(mine.intersection(queue.items)))


def shown(store: Store, item: Item) -> dict[str, Any]:
    """Return the texts of an item: the prompt, the expected answer, and the responses."""
    ids = [i for i in (item.experience_id, item.compared_id) if i]
    found = store.sql(
        "SELECT e.experience_id, coalesce(e.prompt_text, t.prompt_text) AS prompt, t.answer, "
        "e.response_text AS response, e.reward FROM experiences e LEFT JOIN tasks t "
        f"USING (task_id) WHERE {is_in('e.experience_id', ids)}"
    ).pl()
    rows = {row["experience_id"]: row for row in found.to_dicts()}
    missing = [i for i in ids if i not in rows]
    if missing:
        raise NotFoundError(f"experience `{missing[0]}` is not stored anymore")
    first = rows[item.experience_id]
    message = {"prompt": first["prompt"], "answer": first["answer"], "first": first["response"]}
    return message | ({"second": rows[item.compared_id]["response"]} if item.compared_id else {})


def cut(text: str, most: int) -> str:
    """Return a text, cut where it is too long, with the number of characters left out."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def append_new(store: Store, table: str, rows: Sequence[Mapping[str, Any]]) -> int:
    """Append the rows whose ID is not stored yet; return their number."""
    [key] = TABLES[table].key
    stored = set(store.scan(table).select(key).collect()[key])
    new = [row for row in rows if row[key] not in stored]
    return store.append(table, new).rows if new else 0


def _stored(store: Store, items: Iterable[Item]) -> tuple[Item, ...]:
    named = {i: {i.experience_id, i.compared_id or i.experience_id} for i in items}
    ids = store.scan("experiences").select("experience_id")
    wanted = pl.Series(sorted(set().union(*named.values())), dtype=pl.String).implode()
    found = ids.filter(pl.col("experience_id").is_in(wanted)).collect()
    there = set(found["experience_id"])
    return tuple(item for item, both in named.items() if both <= there)


def _row(
    queue: str, item: Item, annotator: str, choice: Choice | None, comment: str
) -> dict[str, Any]:
    return {
        "feedback_id": secrets.token_hex(12),
        "experience_id": item.experience_id,
        "compared_id": item.compared_id,
        "annotator": proper(annotator),
        "label": choice.label if choice else None,
        "score": choice.score if choice else None,
        "comment": proper(comment) or None,
        "queue": queue,
    }


def _chosen(store: Store, query: str, *, in_pairs: bool, limit: int) -> Iterable[Item]:
    relation = store.sql(query)
    names = relation.columns
    if "experience_id" not in names:
        raise ConfigError(f"the queue's query must return `experience_id`, got {names}")
    if "compared_id" in names:
        rows = relation.project("experience_id, compared_id").limit(limit).fetchall()
        return [Item(str(a), None if b is None else str(b)) for a, b in rows]
    ids = relation.project("experience_id::VARCHAR AS experience_id")
    if in_pairs:
        return _pairs(store, ids.pl(), limit)
    return [Item(i) for (i,) in ids.limit(limit).fetchall()]


def _pairs(store: Store, chosen: pl.DataFrame, limit: int) -> list[Item]:
    """Pair the first row of each group with the next one that has another response."""
    stored = store.scan("experiences").select("experience_id", "group_id", "response_text")
    rows = chosen.lazy().join(stored, on="experience_id", how="inner", maintain_order="left")
    rows = rows.filter(pl.col("response_text").is_not_null())
    rows = rows.unique(["group_id", "response_text"], keep="first", maintain_order=True)
    both = rows.group_by("group_id", maintain_order=True).agg(pl.col("experience_id").head(2))
    pairs = both.filter(pl.col("experience_id").list.len() == 2).head(limit).collect()
    return [Item(first, second) for first, second in pairs["experience_id"]]


def _begun(store: Store, queue: str) -> list[Item]:
    rows = store.sql(
        "SELECT experience_id, compared_id FROM feedback WHERE queue = "
        f"{literal(queue)} GROUP BY ALL ORDER BY min(created_at), experience_id, compared_id"
    ).fetchall()
    return [Item(*row) for row in rows]


def _reviews(store: Store, queue: str, annotator: str) -> tuple[dict[Item, int], set[Item]]:
    """Return how many people labeled each item, and the items that this annotator had."""
    rows = store.sql(
        "SELECT experience_id, compared_id, count(DISTINCT annotator) FILTER (label IS NOT NULL), "
        f"bool_or(annotator = {literal(annotator)}) FROM feedback "
        f"WHERE queue = {literal(queue)} GROUP BY ALL"
    ).fetchall()
    found = [(Item(a, b), n, is_mine) for a, b, n, is_mine in rows]
    return {i: n for i, n, _ in found}, {i for i, _, is_mine in found if is_mine}


def _own(annotator: str, item: Item) -> float:
    return seeded_uniform(0, annotator, item.key)


# By md5, not `random()`: each annotator's process must see the same items in the same order.
_SHUFFLED = "ORDER BY md5(experience_id || {seed}), experience_id"
_QUERIES: dict[Kind, str] = {
    "random": "SELECT experience_id FROM experiences WHERE ({where}\n) " + _SHUFFLED,
    # rewards of 0 and 1 make 0.5 the middle; others have one of their own
    "borderline": "SELECT experience_id FROM (SELECT experience_id, abs(reward_mean - "
    "(reward_min + reward_max) / 2) / (reward_max - reward_min) AS far FROM "
    "(SELECT * FROM experiences WHERE ({where}\n)) JOIN (SELECT run_id AS run, group_id AS g, "
    "reward_mean, reward_min, reward_max FROM groups) ON g = group_id AND "
    "run IS NOT DISTINCT FROM run_id WHERE reward_max > reward_min) "
    "ORDER BY far, md5(experience_id || {seed}), experience_id",
    "disagreements": "SELECT experience_id FROM (SELECT experience_id, max(opinion) - "
    "min(opinion) AS apart FROM (SELECT experience_id, reward AS opinion FROM experiences "
    "UNION ALL SELECT experience_id, value FROM scores_current "
    "UNION ALL SELECT experience_id, score FROM feedback_current) WHERE experience_id IN "
    "(SELECT experience_id FROM experiences WHERE ({where}\n)) GROUP BY experience_id) "
    "WHERE apart > 0 ORDER BY apart DESC, md5(experience_id || {seed}), experience_id",
}
