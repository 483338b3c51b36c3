"""Images that tests store and import: `from support.images import png`."""

import io
from typing import Any

from PIL import Image


def picture(color: str, width: int = 8, height: int = 6) -> Image.Image:
    """A picture of one color."""
    return Image.new("RGB", (width, height), color)


def png(color: str, width: int = 8, height: int = 6) -> bytes:
    """The bytes of a PNG of one color."""
    file = io.BytesIO()
    picture(color, width, height).save(file, "PNG")
    return file.getvalue()


def shown(media_id: str, text: str) -> list[dict[str, Any]]:
    """A user's message with an image and a text."""
    parts = [{"type": "image", "media_id": media_id}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]
