"""Argilla: write records to log, and read the records that its datasets export.

`metadata.experience_id` (and `compared_id`) identify the item, else the record's `id` does.
Submitted responses are read: a label, a rating, or a ranking of `first` and `second`; a text
question is the comment. Both forms of responses are read: lists by question, as exported by its
Python package, and a list of responses with `values`, as returned by its server.
Format: https://docs.argilla.io/latest/reference/argilla/records/records/
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from .format import Asked, Given, Record

COMMENT = "comment"
"""The text question whose answer is the comment."""


def read(record: Record) -> Iterator[Given]:
    """Yield the labels of one record, one a person."""
    about = record.get("metadata") or {}
    name = about.get("experience_id") or record.get("external_id") or record["id"]
    for who, said in _by_person(record["responses"]).items():
        label, score, comment = _said(said)
        yield Given(
            experience_id=str(name),
            compared_id=about.get("compared_id"),
            annotator=who,
            label=label,
            score=score,
            comment=comment,
        )


def write(item: Asked) -> dict[str, Any]:
    """Return a record to log, whose fields are prompt, answer and response (or both responses)."""
    fields = {"prompt": item.prompt, "answer": item.answer or "", "response": item.response}
    about = {"experience_id": item.experience_id}
    name = item.experience_id
    if item.compared_id is not None:
        fields["other_response"] = item.other_response or ""
        about["compared_id"] = item.compared_id
        name = f"{name}|{item.compared_id}"
    return {"id": name, "fields": fields, "metadata": about}


def _by_person(responses: Any) -> dict[str, dict[str, Any]]:
    people: dict[str, dict[str, Any]] = defaultdict(dict)
    if isinstance(responses, Mapping):
        for question, given in responses.items():
            for one in given or []:
                if one.get("status", "submitted") == "submitted":
                    people[str(one["user_id"])][question] = one["value"]
        return people
    for one in responses or []:
        if one.get("status", "submitted") == "submitted":
            for question, answer in (one["values"] or {}).items():
                people[str(one["user_id"])][question] = answer["value"]
    return people


def _said(answers: Mapping[str, Any]) -> tuple[str | None, float | None, str | None]:
    comment = answers.get(COMMENT)
    rest = [value for question, value in answers.items() if question != COMMENT]
    if len(rest) > 1:
        raise ValueError(f"it answers {len(rest)} questions other than `{COMMENT}`, expected one")
    if not rest:
        return None, None, comment
    [value] = rest
    if isinstance(value, bool) or value is None:
        raise ValueError(f"the answer {value!r} is not a label, rating or ranking")
    if isinstance(value, int | float):
        return str(value), float(value), comment
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return *_ranked({str(v["value"]): int(v["rank"]) for v in value}), comment
    if isinstance(value, list):
        return ", ".join(map(str, value)), None, comment
    return str(value), None, comment


def _ranked(ranks: Mapping[str, int]) -> tuple[str, float]:
    if set(ranks) != {"first", "second"}:
        raise ValueError(f"it ranks {sorted(ranks)}, expected `first` and `second`")
    if ranks["first"] == ranks["second"]:
        return "tie", 0.5
    return ("first", 1.0) if ranks["first"] < ranks["second"] else ("second", 0.0)
