"""Labels as records whose keys are the columns of `feedback`."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from .format import Asked, Given, Record

_KEYS = ("experience_id", "compared_id", "annotator", "label", "score", "comment")


def read(record: Record) -> Iterator[Given]:
    """Yield the label of one record, if it has one; other keys are ignored."""
    given = {key: record.get(key) for key in _KEYS}
    if all(given[key] is None for key in ("label", "score", "comment")):
        return
    if not record["annotator"]:
        raise ValueError(f"`annotator` must be a name, got {record['annotator']!r}")
    score = given["score"]
    if isinstance(score, bool) or not isinstance(score, int | float | None):
        raise ValueError(f"`score` must be a number, got {score!r}")
    yield Given(
        experience_id=str(record["experience_id"]),
        annotator=str(record["annotator"]),
        compared_id=given["compared_id"],
        label=None if given["label"] is None else str(given["label"]),
        score=None if score is None else float(score),
        comment=given["comment"],
    )


def write(item: Asked) -> dict[str, Any]:
    """Return the item with an empty label, to be filled in."""
    return asdict(item) | {"annotator": None, "label": None, "score": None, "comment": None}
