"""Adjudication: the majority's label of an item becomes one label, or one preference."""

from dataclasses import dataclass

import polars as pl

from ...store import Store
from ...store.ids import content_id, preference_id
from ...store.query import literal
from .queue import append_new

MAJORITY = "majority"
"""The annotator of adjudicated labels."""


@dataclass(frozen=True)
class Adjudicated:
    """Counts of one call of `adjudicate`."""

    labels: int
    """Labels stored under the annotator `majority`."""
    preferences: int
    ties: int
    """Items without a majority."""
    waiting: int
    """Items with too few reviews."""


def adjudicate(store: Store, queue: str, *, reviews: int = 1) -> Adjudicated:
    """Store the majority's label of each item with enough reviews; pairs become preferences.

    A label is a row of `feedback` by the annotator `majority`, so that a run can train on it:
    `side_columns: [reward=feedback:score@majority]`. A second call adds nothing until
    somebody adds or changes a label.
    """
    found = store.sql(
        "SELECT a.*, said_at FROM adjudicated a JOIN (SELECT queue, experience_id, compared_id, "
        "max(created_at) AS said_at FROM labels GROUP BY ALL) s ON a.queue = s.queue "
        "AND a.experience_id = s.experience_id "
        "AND a.compared_id IS NOT DISTINCT FROM s.compared_id "
        f"WHERE a.queue = {literal(queue)} ORDER BY a.experience_id, a.compared_id"
    ).pl()
    enough = found.filter(pl.col("num_labels") >= reviews)
    said = enough.filter(pl.col("label").is_not_null())
    labels = _append_labels(store, queue, said.filter(pl.col("compared_id").is_null()))
    pairs = _append_pairs(store, queue, said.filter(pl.col("compared_id").is_not_null()))
    return Adjudicated(labels, pairs, enough.height - said.height, found.height - enough.height)


def _append_labels(store: Store, queue: str, said: pl.DataFrame) -> int:
    rows = [
        {
            # by the newest label's time: the same majority is one row, and a changed one another
            "feedback_id": content_id(MAJORITY, queue, row["experience_id"], str(row["said_at"])),
            "experience_id": row["experience_id"],
            "annotator": MAJORITY,
            "label": row["label"],
            "score": row["score"],
            "comment": f"{row['num_agreeing']} of {row['num_labels']} in queue {queue}",
        }
        for row in said.to_dicts()
    ]
    return append_new(store, "feedback", rows)


def _append_pairs(store: Store, queue: str, said: pl.DataFrame) -> int:
    task_of = store.scan("experiences").select("experience_id", "task_id")
    rows = said.lazy().filter(pl.col("label").is_in(["first", "second"]))
    rows = rows.join(task_of, on="experience_id", how="inner", maintain_order="left").collect()
    made = []
    for row in rows.to_dicts():
        both = (row["experience_id"], row["compared_id"])
        chosen, rejected = both if row["label"] == "first" else both[::-1]
        made.append(
            {
                "preference_id": preference_id(chosen, rejected),
                "task_id": row["task_id"],
                "chosen_id": chosen,
                "rejected_id": rejected,
                "source": f"human queue {queue}",
            }
        )
    return append_new(store, "preferences", made)
