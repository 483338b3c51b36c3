"""Files of rows that tests write, import and read: `from support.files import bring, write`."""

import json
from pathlib import Path
from typing import Any

from rlake.store import Store
from rlake.store.files import Imported, import_rows, open_input


def write(path: str | Path, *rows: object) -> Path:
    """Write rows as lines of JSON."""
    place = Path(path)
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def lines(path: str | Path) -> list[Any]:
    """Read lines of JSON."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def bring(
    store: Store,
    table: str,
    path: Path,
    *,
    format: str | None = None,
    split: str | None = None,
    **options: Any,
) -> Imported:
    """Import one file."""
    with open_input(path, format=format, split=split) as file:
        return import_rows(store, table, file, split=split, **options)


def ask(text: str) -> dict[str, str]:
    """A message of a user."""
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    """A message of an assistant."""
    return {"role": "assistant", "content": text}
