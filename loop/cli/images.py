"""Print images: what they are, and on a terminal the pictures, two pixels to a character."""

import json
from collections.abc import Sequence
from typing import Any

from rich.padding import Padding
from rich.text import Text

from ...store import Store
from ...store.decode_image import decoded_rgb
from ...store.errors import NotFoundError
from ...store.image_parts import media_ids
from ...store.media import image_bytes
from ...store.query import is_in
from .tables import print_heading, print_rows, screen

_COLUMNS, _ROWS = 40, 40
"""Largest drawing, in pixels; a character has one column and two rows."""
_DRAWN = 4
"""Most images of one conversation that are drawn."""
SHOWN = ("media_id", "mime", "width", "height", "num_bytes", "source")


def images_in(lake: Store, messages: str | None) -> list[dict[str, Any]]:
    """Return the rows of the images that a conversation shows, without their bytes."""
    ids = media_ids(json.loads(messages)) if messages and '"media_id"' in messages else []
    query = f"SELECT {', '.join(SHOWN)} FROM media WHERE {is_in('media_id', set(ids))}"
    found = {row["media_id"]: row for row in lake.sql(query).to_arrow_table().to_pylist()}
    return [found.get(one) or dict.fromkeys(SHOWN) | {"media_id": one} for one in ids]


def print_images(lake: Store, images: Sequence[dict[str, Any]]) -> None:
    """List images; draw the first ones if the output is a terminal."""
    print_heading("images")
    print_rows(SHOWN, [list(image.values()) for image in images])
    if not screen().is_terminal:
        return
    try:
        files = image_bytes(lake, [image["media_id"] for image in images[:_DRAWN]])
    except NotFoundError:  # the list above says so, by a row without values
        return
    for image in images[:_DRAWN]:
        screen().print(Padding(half_blocks(files[image["media_id"]]), (1, 0, 0, 2)))


def half_blocks(data: bytes) -> Text:
    """Return an image as characters whose upper and lower halves are two pixels."""
    from PIL import Image

    _, picture = decoded_rgb(data)
    picture.thumbnail((_COLUMNS, _ROWS))
    if picture.height % 2:
        whole = Image.new("RGB", (picture.width, picture.height + 1))
        whole.paste(picture)
        picture = whole
    pixels: Any = picture.load()
    text = Text()
    for y in range(0, picture.height, 2):
        text.append("\n" if y else "")
        for x in range(picture.width):
            upper, lower = (f"#{bytes(pixels[x, at]).hex()}" for at in (y, y + 1))
            text.append("▀", style=f"{upper} on {lower}")
    return text
