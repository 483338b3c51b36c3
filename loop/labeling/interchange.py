"""Import labels from other tools, and export items to them."""

from collections.abc import Iterable, Iterator, Sequence

from ...store import Appended, Store
from ...store.errors import InputError, nearest
from ...store.files.annotations import Asked, Given
from ...store.ids import content_id
from .queue import Item, append_new, shown

__all__ = ["Given", "asked", "store_labels"]


def store_labels(
    store: Store, given: Sequence[Given], *, queue: str | None, source: str
) -> Appended:
    """Append labels to `feedback`, all or none; labels that are stored already are skipped.

    Raises InputError for a label of an experience that is not stored.
    """
    _check_known(store, given, source)
    rows = {}
    for one in given:
        row = vars(one) | {"queue": queue}
        name = content_id(*(row[k] for k in sorted(row)))
        rows[name] = row | {"feedback_id": name}
    done = append_new(store, "feedback", list(rows.values()))
    return Appended(done, len(rows) - done, store.versions()["feedback"])


def asked(store: Store, items: Iterable[Item]) -> Iterator[Asked]:
    """Yield items in the form that a labeling tool reads."""
    for item in items:
        message = shown(store, item)
        yield Asked(
            experience_id=item.experience_id,
            prompt=message["prompt"] or "",
            response=message["first"] or "",
            answer=message["answer"],
            compared_id=item.compared_id,
            other_response=message.get("second"),
        )


def _check_known(store: Store, given: Sequence[Given], source: str) -> None:
    named = {i for one in given for i in (one.experience_id, one.compared_id) if i}
    known = set(store.scan("experiences").select("experience_id").collect()["experience_id"])
    strange = sorted(named - known)
    if strange:
        raise InputError(
            f"{source} labels {len(strange)} experience{'s' if len(strange) > 1 else ''} that "
            f"{'are' if len(strange) > 1 else 'is'} not stored, such as "
            f"`{strange[0]}`{nearest(strange[0], known) if len(known) < 10_000 else ''}"
        )
