"""Label Studio: write tasks to import there, and read its JSON export.

The fields `experience_id` and `compared_id` of a task's `data` identify the item. Results of
Choices, Rating, Pairwise and TextArea are read; predictions and canceled annotations are skipped.
Format: https://labelstud.io/guide/task_format.html
"""

from collections.abc import Iterator, Mapping
from typing import Any

from .format import Asked, Given, Record

_SIDES = {"left": ("first", 1.0), "right": ("second", 0.0)}


def read(record: Record) -> Iterator[Given]:
    """Yield the labels of one task, one an annotation."""
    data = record["data"]
    if "annotations" not in record:
        raise ValueError("it has no `annotations`; export as JSON, not as JSON-MIN")
    for annotation in record["annotations"]:
        if annotation.get("was_cancelled"):
            continue
        label, score, comment = _said(annotation.get("result") or [])
        if label is None and score is None and comment is None:
            continue
        yield Given(
            experience_id=str(data["experience_id"]),
            compared_id=data.get("compared_id"),
            annotator=_who(annotation.get("completed_by")),
            label=label,
            score=score,
            comment=comment,
        )


def write(item: Asked) -> dict[str, Any]:
    """Return a task to import."""
    data = {
        "experience_id": item.experience_id,
        "prompt": item.prompt,
        "answer": item.answer,
        "response": item.response,
    }
    if item.compared_id is not None:
        data |= {"compared_id": item.compared_id, "other_response": item.other_response}
    return {"data": data}


def _said(results: list[Mapping[str, Any]]) -> tuple[str | None, float | None, str | None]:
    label: str | None = None
    score: float | None = None
    comment: str | None = None
    for result in results:
        kind, value = result.get("type"), result.get("value") or {}
        if kind == "choices":
            label = ", ".join(map(str, value["choices"]))
        elif kind == "rating":
            score = float(value["rating"])
            label = label or str(value["rating"])
        elif kind == "pairwise":
            label, score = _SIDES[value["selected"]]
        elif kind == "textarea":
            text = value["text"]
            comment = "\n".join(text) if isinstance(text, list) else str(text)
    return label, score, comment


def _who(completed_by: object) -> str:
    """Return who annotated: an id or, in newer exports, a person's fields."""
    if isinstance(completed_by, Mapping):
        completed_by = completed_by.get("email") or completed_by.get("id")
    if completed_by is None:
        raise ValueError("an annotation has no `completed_by`")
    return str(completed_by)
