"""The images that drawn rows show, and why a row with images cannot be trained on."""

import json
from typing import TYPE_CHECKING

import polars as pl

from ...store.errors import NotFoundError
from ...store.image_parts import media_ids

if TYPE_CHECKING:
    from ..models.images import Images

_SHOWS = '"media_id"'


def with_media(rows: pl.DataFrame, images: "Images | None") -> list[pl.Series]:
    """Return `media_ids` of rows, and `wrong_media`: why a row cannot be trained on, or NULL."""
    # Rows of text only take no look at each, which would make Python objects of all their tokens.
    # Cast, since an operator may have left NULL alone, which is a type of its own.
    if not rows["messages"].cast(pl.String).str.contains(_SHOWS, literal=True).any():
        empty = pl.Series("media_ids", [[]], pl.List(pl.String))
        return [
            empty.new_from_index(0, rows.height),
            pl.Series("wrong_media", [None], pl.String).new_from_index(0, rows.height),
        ]
    found: list[list[str]] = []
    wrong: list[str | None] = []
    for text, token_ids in rows.select("messages", "token_ids").iter_rows():
        media = _media(text)
        why = _wrong(media, token_ids, images) if media else None
        found.append([] if why else media)
        wrong.append(why)
    return [
        pl.Series("media_ids", found, pl.List(pl.String)),
        pl.Series("wrong_media", wrong, pl.String),
    ]


def _media(messages: str | None) -> list[str]:
    return media_ids(json.loads(messages)) if messages and _SHOWS in messages else []


def _wrong(media: list[str], token_ids: list[int] | None, images: "Images | None") -> str | None:
    if images is None:
        return "it shows images, and the model reads none; take a vision-language model"
    try:
        expected = images.count(media)
    except (NotFoundError, ValueError) as error:  # the latter for one too narrow for the model
        return str(error)
    # an answer may hold more of them, as text
    if token_ids is not None and token_ids.count(images.token_id) < expected:
        return f"its token_ids have fewer than the {expected} tokens that its images take"
    return None
