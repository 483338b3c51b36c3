"""Images of imported rows: read from columns, data URLs and files, stored, and named by id."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..conversation import last_question
from ..errors import InputError, NotFoundError, shorten
from ..image_parts import parts_of, source_of, with_ids
from ..media import (
    LIMITS,
    ImageLimits,
    check_size,
    data_url_bytes,
    file_bytes,
    image_row,
    image_sizes,
)
from ..raw_json import dumps
from ..schema import TABLES
from ..store import Store
from ..validate import check
from .select_columns import IMAGE_COLUMNS, RowError, values_of, with_column

IMAGES = pa.list_(pa.struct([("bytes", pa.large_binary()), ("path", pa.string())]))
"""How rows of a named format give them."""
_MARKER = "<image>"
_SHOWS = re.compile(r'"(image|image_url|input_image)"')
_BATCH_BYTES = 64 << 20

Put = Callable[[pa.Table], None]
"""Takes rows of `media`."""


class RowImages:
    """Names the images of an import's rows, and passes each new one on once."""

    def __init__(self, store: Store, *, limits: ImageLimits = LIMITS) -> None:
        self._store, self._limits = store, limits
        self._seen: set[str] = set()

    def named(self, rows: pa.Table, folder: Path | None, source: str, put: Put) -> pa.Table:
        """Return rows whose messages name their images, without the columns of images.

        Raises RowError for an image that cannot be stored.
        """
        columns = [n for n in IMAGE_COLUMNS if n in rows.column_names]
        texts = values_of(rows, "messages")
        if not columns and not any(text and _SHOWS.search(text) for text in texts):
            return rows
        prompts = values_of(rows, "prompt_text")
        cells = list(zip(*(values_of(rows, name) for name in columns), strict=True))
        new = _New(self._seen, self._limits, source, put)
        for i, text in enumerate(texts):
            try:
                sources = sources_of(cells[i]) if cells else []
                if sources or (text and _SHOWS.search(text)):
                    asked = [{"role": "user", "content": prompts[i]}]
                    messages = json.loads(text) if text else asked
                    named = self._named(messages, sources, folder, new)
                    texts[i], prompts[i] = dumps(named), prompts[i] and last_question(named)
            except (InputError, NotFoundError) as error:
                raise RowError(i, str(error)) from error
        new.flush()
        rows = rows.select([n for n in rows.column_names if n not in IMAGE_COLUMNS])
        if "prompt_text" in rows.column_names:
            rows = with_column(rows, "prompt_text", prompts, pa.string())
        return with_column(rows, "messages", texts, pa.string())

    def _named(
        self, messages: list[Any], sources: list[str | bytes], folder: Path | None, new: "_New"
    ) -> list[Any]:
        rest = iter(sources)
        messages = _with_places(messages, len(sources))

        def name(part: Mapping[str, Any]) -> str:
            if part.get("media_id") is not None:
                # raises if it is not stored
                return next(iter(image_sizes(self._store, [str(part["media_id"])])))
            source = source_of(part)
            return new.add(next(rest) if source is None else source, folder)

        return with_ids(messages, name)


class _New:
    """Images that were not met before in this import, in batches."""

    def __init__(self, seen: set[str], limits: ImageLimits, source: str, put: Put) -> None:
        self._seen, self._limits, self._source, self._put = seen, limits, source, put
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def add(self, image: str | bytes, folder: Path | None) -> str:
        """Return the id of an image; store it if it is new."""
        is_inline = isinstance(image, bytes) or image.startswith("data:")
        name = "an image" if is_inline else f"image `{shorten(str(image), 60)}`"
        data = image if isinstance(image, bytes) else self._read(image, name, folder)
        check_size(name, len(data), self._limits)
        media_id = hashlib.sha256(data).hexdigest()
        if media_id not in self._seen:
            row = image_row(data, name=name, source=self._source, limits=self._limits)
            self._seen.add(media_id)
            self._rows.append(row)
            self._bytes += len(data)
            if self._bytes >= _BATCH_BYTES:
                self.flush()
        return media_id

    def flush(self) -> None:
        """Pass the collected images on."""
        if self._rows:
            self._put(check(TABLES["media"], self._rows))
        self._rows, self._bytes = [], 0

    def _read(self, image: str, name: str, folder: Path | None) -> bytes:
        if image.startswith("data:"):
            return data_url_bytes(image, name, limits=self._limits)
        if re.match(r"\w+://", image):
            raise InputError(
                f"{name} is at an address, and addresses are not read; download it, and give its "
                "path or bytes"
            )
        if folder is None:
            raise InputError(
                f"{name} is a path, and the rows come from no folder; name one with `--images`"
            )
        return file_bytes(image, folder, limits=self._limits)


def sources_of(value: Any) -> list[str | bytes]:
    """Return the images of a cell: bytes, a path, a struct of both, or a list of those.

    Raises InputError for anything else.
    """
    if isinstance(value, str) and value[:1] in ("[", "{", '"'):
        with suppress(json.JSONDecodeError):  # else it is a path, such as `[1].png`
            value = json.loads(value)
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [one for item in value for one in sources_of(item)]
    if isinstance(value, Mapping):
        # of both, the bytes: a path is then only what the file was called
        value = value.get("bytes") or source_of(value)
    if not isinstance(value, str | bytes):
        raise InputError(
            f"an image is {shorten(repr(value), 60)}, expected bytes, a path, or a struct of both"
        )
    return [value]


def as_cell(sources: Sequence[str | bytes]) -> list[dict[str, Any]]:
    """Return images as a value of type IMAGES."""
    return [{"bytes" if isinstance(one, bytes) else "path": one} for one in sources]


def _with_places(messages: list[Any], count: int) -> list[Any]:
    """Return messages that have a part without a source for each of `count` images.

    They stand where the messages say so, by such parts or by `<image>` in their text; else before
    the first user's message. Raises InputError if the messages have places for another number.
    """
    open_parts = sum(source_of(part) is None for part in parts_of(messages))
    markers = sum(_text(m).count(_MARKER) for m in messages) if count and not open_parts else 0
    places = open_parts or markers
    if places != count and (places or not count):
        raise InputError(
            f"the messages have places for {places} images and the row has {count}; give as many "
            "of both"
        )
    if open_parts or not count:
        return messages
    if markers:
        return [_marked(message) for message in messages]
    first = next((i for i, m in enumerate(messages) if m.get("role") == "user"), 0)
    content = messages[first].get("content")
    texts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    shown = {**messages[first], "content": [*[{"type": "image"}] * count, *texts]}
    return [*messages[:first], shown, *messages[first + 1 :]]


def _marked(message: Mapping[str, Any]) -> Mapping[str, Any]:
    text = _text(message)
    return {**message, "content": _split(text)} if _MARKER in text else message


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _split(text: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for i, one in enumerate(text.split(_MARKER)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": one}] if one else []
    return parts
