"""Images of exported lines: files next to a JSONL, or bytes in a table, as in TRL and datasets."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..image_parts import media_ids
from ..media import image_bytes
from ..raw_json import Raw, dumps
from ..store import Store
from .atomic_writer import SUFFIXES, Line, part_of

_MESSAGES = ("messages", "prompt", "completion", "chosen", "rejected")
_MENTIONS = '"media_id"'
_SUFFIX = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp"}


class ImageExport:
    """Gives lines whose messages show images a column `images`, in the order of the messages."""

    def __init__(self, store: Store, path: Path) -> None:
        self._store = store
        is_text = SUFFIXES.get(path.suffix) == "jsonl"
        self.folder = path.with_name(f"{path.stem}_images") if is_text else None
        """Where the images of a JSONL go: `out_images` next to `out.jsonl`."""
        self._as_parts = False

    def look(self, chunks: Iterable[Sequence[Line]]) -> None:
        """Look for images in the lines of a table, whose contents must all have one type."""
        if self.folder is None and self._store.count("media"):
            self._as_parts = any(_taken(line)[1] for lines in chunks for line in lines)

    def shown(self, lines: Sequence[Line]) -> list[Line]:
        """Return lines with their images; messages have a part `{"type": "image"}` for each."""
        found = [_taken(line, as_parts=self._as_parts) for line in lines]
        ids = {one for _, ids in found for one in ids}
        if not ids:
            return list(lines)
        files = {one: self._file(one, data) for one, data in image_bytes(self._store, ids).items()}
        return [
            {**line, "images": [files[one] for one in ids]} if ids else line for line, ids in found
        ]

    def _file(self, media_id: str, data: bytes) -> Any:
        suffix = next((s for begins, s in _SUFFIX.items() if data.startswith(begins)), "img")
        name = f"{media_id}.{suffix}"
        if self.folder is None:
            return {"bytes": data, "path": name}
        self.folder.mkdir(exist_ok=True)
        path = self.folder / name
        if not path.exists():
            part = part_of(path)
            part.write_bytes(data)
            part.replace(path)
        return f"{self.folder.name}/{name}"


def _taken(line: Line, *, as_parts: bool = False) -> tuple[Line, list[str]]:
    """Return a line whose messages name no image, and the images that they named, in order.

    With `as_parts`, texts become lists of one part too.
    """
    ids: list[str] = []
    made = dict(line)
    for name, value in line.items():
        if isinstance(value, Raw) and name in _MESSAGES and (as_parts or _MENTIONS in value):
            messages = json.loads(value)
            ids += media_ids(messages)
            for message in messages:
                content = message.get("content")
                if isinstance(content, list):
                    message["content"] = [_without_id(part) for part in content]
                elif as_parts and content is not None:
                    message["content"] = [{"type": "text", "text": content}]
            made[name] = dumps(messages)
    return made, ids


def _without_id(part: Any) -> Any:
    return {"type": "image"} if isinstance(part, dict) and part.get("media_id") else part
