"""Images as rows of `media`: checked, stored once by their content, and read again by id."""

import base64
import binascii
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import lance
import pyarrow as pa

from .append import WritableTables
from .decode_image import decoded_rgb
from .errors import InputError, NotFoundError, counted, shorten
from .image_parts import Part, media_ids, source_of, with_ids, with_parts
from .query import is_in
from .tables import Tables

_BATCH_BYTES = 64 << 20
_IN_CHUNK = 500


@dataclass(frozen=True)
class ImageLimits:
    """What an image may be at most; a small file may hold a picture of gigabytes."""

    max_bytes: int = 20 << 20
    max_pixels: int = 64 << 20
    bytes_option: str = "rlake import --max-image-bytes"
    """What raises `max_bytes`, for errors."""
    pixels_option: str = "rlake import --max-image-pixels"
    """What raises `max_pixels`, for errors."""


LIMITS = ImageLimits()


def image_row(
    data: bytes, *, name: str = "the image", source: str | None = None, limits: ImageLimits = LIMITS
) -> dict[str, Any]:
    """Return the row of `media` of an image's bytes; `name` is what errors call it.

    Raises InputError for one that is too large, too narrow, of another format, or does not decode.
    """
    check_size(name, len(data), limits)
    mime, image = decoded_rgb(
        data, name=name, max_pixels=limits.max_pixels, option=limits.pixels_option
    )
    return {
        "media_id": hashlib.sha256(data).hexdigest(),
        "mime": mime,
        "width": image.width,
        "height": image.height,
        "num_bytes": len(data),
        "data": data,
        "source": source,
    }


def check_size(name: str, nbytes: int, limits: ImageLimits) -> None:
    """Raise InputError for more bytes than the limits allow, or none."""
    if nbytes > limits.max_bytes:
        raise InputError(
            f"{name} has {nbytes:,} bytes, expected at most {limits.max_bytes:,}; make it smaller, "
            f"or raise the limit (`{limits.bytes_option}`)"
        )
    if not nbytes:
        raise InputError(f"{name} is empty, expected the bytes of an image; leave it out")


def data_url_bytes(url: str, name: str, *, limits: ImageLimits = LIMITS) -> bytes:
    """Return the bytes of a `data:` URL; raise InputError for one that is not valid."""
    header, comma, body = url.partition(",")
    # before the bytes are made: base64 takes four characters for three of them
    check_size(name, len(body) * 3 // 4, limits)
    try:
        if not comma:
            raise ValueError("it has no comma")
        if not header.endswith(";base64"):
            return unquote_to_bytes(body)
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error) as error:
        raise InputError(
            f"{name} is not a valid data URL: {error}; expected `data:image/png;base64,...`"
        ) from error


def file_bytes(path: str | Path, folder: Path, *, limits: ImageLimits = LIMITS) -> bytes:
    """Read an image's file, which must lie in a folder, links followed.

    Raises InputError for one that is missing, too large, or outside the folder.
    """
    name, root = f"image `{shorten(str(path), 60)}`", folder.resolve()
    if "\0" in str(path):
        raise InputError(f"{name} has a zero byte, expected a path; correct it")
    found = (root / path).resolve()
    if not found.is_relative_to(root):
        raise InputError(
            f"{name} lies outside of `{folder}`, and only files in there are read; copy it there, "
            "or name another folder with `--images`"
        )
    try:
        check_size(name, found.stat().st_size, limits)
        return found.read_bytes()
    except OSError as error:
        raise InputError(
            f"{name} cannot be read in `{folder}`: {error.strerror}; correct its path, or name "
            "another folder with `--images`"
        ) from error


def put_images(
    store: WritableTables,
    images: Iterable[bytes],
    *,
    source: str | None = None,
    limits: ImageLimits = LIMITS,
) -> list[str]:
    """Store images that are not stored yet, and return the `media_id` of each.

    >>> import io
    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("RGB", (4, 3), "red").save(file, "PNG")
    >>> [media_id] = put_images(store, [file.getvalue()])
    >>> store.sql("SELECT mime, width, height FROM media").fetchall()
    [('image/png', 4, 3)]

    They are stored in a few commits; a call that was killed is repeated without harm. Raises
    InputError for an image that is too large or does not decode; the ones before it may be stored.
    """
    ids: list[str] = []
    for rows in _batches(image_row(data, source=source, limits=limits) for data in images):
        store.append("media", rows)
        ids += [row["media_id"] for row in rows]
    return ids


def _batches(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    kept: list[dict[str, Any]] = []
    nbytes = 0
    for row in rows:
        kept.append(row)
        nbytes += row["num_bytes"]
        if nbytes >= _BATCH_BYTES:
            yield kept
            kept, nbytes = [], 0
    if kept:
        yield kept


def name_images(
    store: WritableTables,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    *,
    source: str | None = None,
    limits: ImageLimits = LIMITS,
) -> list[list[dict[str, Any]]]:
    """Store the images in messages, and return the messages with their ids in place of them.

    Images are bytes or `data:` URLs; those that are stored already are not decoded again. Raises
    InputError for anything else, and for an image that is too large or does not decode;
    NotFoundError for an id that is not stored.
    """
    files: dict[str, bytes] = {}
    named: set[str] = set()

    def name(part: Part) -> str:
        if part.get("media_id") is not None:
            named.add(str(part["media_id"]))
            return str(part["media_id"])
        given = source_of(part)
        if isinstance(given, str) and given.startswith("data:"):
            given = data_url_bytes(given, "an image", limits=limits)
        if not isinstance(given, bytes):
            raise InputError(
                f"an image of the messages is {shorten(repr(given), 60)}, expected its bytes in a "
                "data URL (`data:image/png;base64,...`), or the `media_id` of a stored one"
            )
        media_id = hashlib.sha256(given).hexdigest()
        files[media_id] = given
        return media_id

    made = [with_ids(messages, name) for messages in conversations]
    known = {
        row["media_id"]
        for found in _rows(store.dataset("media"), files, ["media_id"])
        for row in found.to_pylist()
    }
    new = (data for one, data in files.items() if one not in known)
    for batch in _batches(
        image_row(data, name="an image", source=source, limits=limits) for data in new
    ):
        store.append("media", batch)
    image_sizes(store, named)
    return made


def image_files(store: Tables, media_ids: Iterable[str]) -> dict[str, tuple[str, bytes]]:
    """Return the MIME type and the bytes of stored images by id; no other image is read.

    Raises NotFoundError for an id that is not stored.
    """
    found: dict[str, tuple[str, bytes]] = {}
    dataset = store.dataset("media")
    for rows in _rows(dataset, media_ids, ["media_id", "mime"]):
        files = dataset.read_blobs("data", ids=rows.column("_rowid"), preserve_order=True)
        ids, mimes = (rows.column(name).to_pylist() for name in ("media_id", "mime"))
        each = zip(ids, mimes, files, strict=True)
        found |= {one: (mime, data or b"") for one, mime, (_, data) in each}
    check_stored(media_ids, found)
    return found


def image_bytes(store: Tables, media_ids: Iterable[str]) -> dict[str, bytes]:
    """Return the bytes of stored images by id; NotFoundError as `image_files`."""
    return {one: data for one, (_, data) in image_files(store, media_ids).items()}


def with_data_urls(store: Tables, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as OpenAI's API reads them: each stored image as a `data:` URL.

    Other parts stay as they are. Raises NotFoundError for an id that is not stored.
    """
    urls = {
        one: f"data:{mime};base64,{base64.b64encode(data).decode()}"
        for one, (mime, data) in image_files(store, media_ids(messages)).items()
    }

    def shown(part: Part) -> Part:
        url = urls.get(str(part.get("media_id")))
        return part if url is None else {"type": "image_url", "image_url": {"url": url}}

    return with_parts(messages, shown)


def image_sizes(store: Tables, media_ids: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return width and height of stored images by id; raise NotFoundError as `image_bytes`."""
    found: dict[str, tuple[int, int]] = {}
    for rows in _rows(store.dataset("media"), media_ids, ["media_id", "width", "height"]):
        found |= {row["media_id"]: (row["width"], row["height"]) for row in rows.to_pylist()}
    check_stored(media_ids, found)
    return found


def _rows(
    dataset: lance.LanceDataset, media_ids: Iterable[str], columns: Sequence[str]
) -> Iterator[pa.Table]:
    wanted = sorted(set(media_ids))
    for i in range(0, len(wanted), _IN_CHUNK):
        chosen = is_in("media_id", wanted[i : i + _IN_CHUNK])
        rows = dataset.to_table(columns=[*columns], filter=chosen, with_row_id=True)
        if rows.num_rows:
            yield rows


def check_stored(media_ids: Iterable[str], found: Mapping[str, object]) -> None:
    """Raise NotFoundError for ids that were not found."""
    lost = sorted(set(media_ids) - found.keys())
    if lost:
        raise NotFoundError(
            f"{counted(len(lost), 'image')} not in `media`, such as `{lost[0]}`; import rows that "
            "show it, or store it with `put_images`"
        )
