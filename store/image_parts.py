"""Images in messages: the parts of a message's content that are images, and what they name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .errors import InputError, shorten

Part = Mapping[str, Any]
_TYPES = ("image", "image_url", "input_image")
_SOURCES = ("media_id", "image_url", "image", "url", "path", "base64", "bytes")


def is_image(part: object) -> bool:
    """Return whether a part of a message's content is an image, in one of the known spellings."""
    return isinstance(part, Mapping) and part.get("type") in _TYPES


def parts_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    """Yield the images of a conversation, in their order.

    >>> shown = {"type": "image_url", "image_url": {"url": "data:,"}}
    >>> list(parts_of([{"role": "user", "content": [shown, {"type": "text", "text": "?"}]}]))
    [{'type': 'image_url', 'image_url': {'url': 'data:,'}}]
    """
    for message in messages:
        content = message.get("content")
        yield from filter(is_image, content if isinstance(content, list) else ())


def media_ids(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the ids of the stored images that a conversation shows, in their order.

    >>> media_ids([{"role": "user", "content": [{"type": "image", "media_id": "5e0c"}]}])
    ['5e0c']
    """
    return [part["media_id"] for part in parts_of(messages) if part.get("media_id")]


def source_of(part: Part) -> str | bytes | None:
    """Return what an image part names: a data URL, a path or an address; None if nothing.

    Raises InputError for a part that names it in an unknown way.
    """
    key = next((k for k in _SOURCES if part.get(k) is not None), None)
    value = None if key is None else part[key]
    if isinstance(value, Mapping):
        return source_of({k: v for k, v in value.items() if k in _SOURCES})
    if value is not None and not isinstance(value, str | bytes):
        raise InputError(
            f"an image is {shorten(repr(value), 60)}, expected a data URL or a path; see "
            "`image_url` in OpenAI's format"
        )
    return f"data:;base64,{value}" if key == "base64" else value


def with_ids(
    messages: Sequence[Mapping[str, Any]], name: Callable[[Part], str]
) -> list[dict[str, Any]]:
    """Return messages in which each image is named by the id that `name` gives."""
    return with_parts(messages, lambda part: {"type": "image", "media_id": name(part)})


def with_parts(
    messages: Sequence[Mapping[str, Any]], change: Callable[[Part], Part]
) -> list[dict[str, Any]]:
    """Return messages in which each image is what `change` makes of it."""

    def part_of(part: Any) -> Any:
        return change(part) if is_image(part) else part

    def changed(message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        return (
            {**message, "content": [*map(part_of, content)]}
            if isinstance(content, list)
            else {**message}
        )

    return [changed(message) for message in messages]
