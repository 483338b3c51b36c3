"""Decode the file of an image: one way for what is stored of it, for models, and for terminals."""

import io
import struct
import threading
import warnings
from typing import TYPE_CHECKING

from .errors import InputError, missing_extra, shorten

if TYPE_CHECKING:
    from PIL.Image import Image

MIMES = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
}
"""Formats that are accepted, as Pillow names them, with their MIME types."""
MOST_PIXELS = 178_956_970
"""Pillow refuses an image of more, whatever our own limit."""
_MOST_ASPECT = 200
"""Image processors of Qwen's models raise for a side that is longer than the other by more."""
_EXPECTED = f"expected a whole file of {', '.join(MIMES)}; repair it, or leave it out"
_LOCK = threading.Lock()
"""Both warnings and Pillow's tolerance of truncated files are settings of the process."""


def decoded_rgb(
    data: bytes,
    *,
    name: str = "the image",
    max_pixels: int = MOST_PIXELS,
    option: str = "rlake import --max-image-pixels",
) -> "tuple[str, Image]":
    """Return the MIME type of an image and its pixels in RGB, turned as its EXIF data say.

    It is decoded wholly, so that one that is cut off is refused on import and not in training.
    `option` is what raises `max_pixels`, for errors. Raises InputError for one that is too large,
    too narrow, of another format, or does not decode.
    """
    try:
        from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise missing_extra("pillow", "vision") from error
    too_large = (
        f"{{}} pixels, expected at most {max_pixels:,}; make it smaller, or raise the limit "
        f"(`{option}`)"
    )
    try:
        with _LOCK, warnings.catch_warnings():
            # ours is the limit; Pillow's own would warn of less
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            # other packages set it, and half a picture would pass for a whole one
            tolerated, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
            try:
                image = Image.open(io.BytesIO(data), formats=list(MIMES))
                _check_shape(name, image.width, image.height, max_pixels, too_large)
                turned = ImageOps.exif_transpose(image)
            finally:
                ImageFile.LOAD_TRUNCATED_IMAGES = tolerated
        if turned.mode.startswith("I;16"):
            turned = turned.point(lambda value: value * (1 / 256))  # `convert` clips to 255
        return MIMES[str(image.format)], turned.convert("RGB")
    except Image.DecompressionBombError as error:
        raise InputError(f"{name} has {too_large.format('too many')}") from error
    except UnidentifiedImageError as error:
        raise InputError(f"{name} does not decode: its format is not known; {_EXPECTED}") from error
    except InputError:  # which is a ValueError
        raise
    except (OSError, SyntaxError, ValueError, EOFError, TypeError, struct.error) as error:
        why = shorten(str(error), 100)
        raise InputError(f"{name} does not decode: {why}; {_EXPECTED}") from error


def _check_shape(name: str, width: int, height: int, max_pixels: int, too_large: str) -> None:
    if width * height > max_pixels:
        raise InputError(f"{name} has {too_large.format(f'{width * height:,}')}")
    if max(width, height) > _MOST_ASPECT * min(width, height):
        raise InputError(
            f"{name} has {width} x {height} pixels, expected a side at most {_MOST_ASPECT} times "
            "the other, which models can read; cut it, or leave it out"
        )
