"""A file that is to be imported: what kind it is, and whether it can be read at all."""

import codecs
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import ConfigError, InputError, nearest
from .arrows import saved
from .formats import FORMATS, Format
from .session import InputFile, InputSession

__all__ = ["KINDS", "InputFile", "InputSession", "open_input"]

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".db": "sqlite",
    ".sqlite": "sqlite",
    ".sqlite3": "sqlite",
}
"""Kinds of file by suffix; a folder is a dataset that Hugging Face `datasets` saved: hf."""
KIND_NAMES = {
    "jsonl": "lines of JSON objects",
    "json": "objects, in a list or one after the other",
    "csv": "comma, semicolon or tab separated",
    "parquet": "Parquet",
    "arrow": "Arrow IPC, file or stream; Feather",
    "hf": "a folder that Hugging Face datasets saved with save_to_disk",
}
"""The kinds that `format` may name, with half a line for people who choose one."""
_BEGINNINGS = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow",
    b"SQLite format 3\x00": "sqlite",
}
_LONGEST_LINE = 64 << 20


@contextmanager
def open_input(
    path: str | Path,
    *,
    format: str | None = None,
    skip_bad: bool = False,
    split: str | None = None,
) -> Iterator[InputFile]:
    """Look at a file before anything is imported.

    `format` is one of KIND_NAMES or of FORMATS; the suffix, or how the file begins, tells the kind
    otherwise. With `skip_bad`, lines of JSONL that do not parse are left out and counted. `split`
    chooses one of a folder's datasets.

    Raises InputError for a file that is missing, empty or broken, ConfigError for an unknown
    format.

    >>> path = tmp / "tasks.jsonl"
    >>> _ = path.write_text('{"prompt_text": "1+1=", "answer": "2"}')
    >>> with open_input(path) as file:
    ...     file.kind
    'jsonl'
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"`{path}` does not exist")
    kind, named = _kind(path, format)
    if path.is_dir() != (kind == "hf"):
        what = "a folder, expected a file" if path.is_dir() else "a file, expected a folder"
        raise InputError(f"`{path}` is {what}")
    if skip_bad and kind != "jsonl":
        raise ConfigError(f"`--skip-bad` leaves out lines of jsonl files, got a {kind} file")
    if kind == "hf":
        yield InputFile(path, path.name, kind, named, paths=tuple(saved(path, split)))
        return
    bad = _checked(path, kind)
    if bad and not skip_bad:
        line, reason = next(iter(bad.items()))
        more = f" ({len(bad)} such lines)" if len(bad) > 1 else ""
        raise InputError(
            f"`{path}` line {line} {reason}{more}; nothing was imported; mend the file, or leave "
            "such lines out with `--skip-bad`"
        )
    if not bad:
        yield InputFile(path, path.name, kind, named)
        return
    with TemporaryDirectory(prefix="rlake-import-") as folder:
        clean = _without(path, set(bad), Path(folder) / "input.jsonl")
        yield InputFile(clean, path.name, kind, named, len(bad))


def _kind(path: Path, format: str | None) -> tuple[str, Format | None]:
    """Return the kind of file, and the named format if it is one."""
    if format is not None and format not in KIND_NAMES and format not in FORMATS:
        raise ConfigError(
            f"there is no format `{format}`{nearest(format, [*KIND_NAMES, *FORMATS])}"
        )
    if format in KIND_NAMES:
        return format, None
    named = FORMATS[format] if format else None
    kind = "hf" if path.is_dir() else KINDS.get(path.suffix.lower()) or _sniffed(path)
    if kind is None and named is not None:
        kind = "sqlite" if format == "trinity" else "jsonl"
    if kind is None:
        raise InputError(
            f"cannot tell what kind of file `{path}` is, expected one of {', '.join(KINDS)}; "
            "say so with `--format`"
        )
    if kind == "sqlite" and named is None:
        named = FORMATS["trinity"]
    is_trinity = named is not None and named.name == "trinity"
    if is_trinity != (kind == "sqlite"):
        needed = "needs an SQLite database" if is_trinity else "does not read that"
        raise InputError(f"`{path}` is a {kind} file, and format `{format}` {needed}")
    return kind, named


def _sniffed(path: Path) -> str | None:
    """Tell the kind of a file by its first bytes, where no other kind begins so."""
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror}") from error
    return next((kind for begins, kind in _BEGINNINGS.items() if start.startswith(begins)), None)


def _checked(path: Path, kind: str) -> dict[int, str]:
    """Return the lines that are wrong, with the reason; only those of JSONL can be told."""
    try:
        if not path.stat().st_size:
            raise InputError(f"`{path}` is empty; nothing was imported")
        return dict(_bad_lines(path)) if kind == "jsonl" else {}
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror}") from error


def _bad_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number of each line that is not a JSON object, and why."""
    with path.open("rb") as lines:
        number = 0
        while line := lines.readline(_LONGEST_LINE):
            number += 1
            reason = _why_bad(line) if line.strip() else None
            if reason:
                yield number, reason


def _why_bad(line: bytes) -> str | None:
    if len(line) == _LONGEST_LINE:
        return f"is longer than {_LONGEST_LINE >> 20} MiB"
    if line.startswith(codecs.BOM_UTF8):
        return "starts with a byte order mark, expected UTF-8 without one"
    try:
        value = json.loads(line.decode())
        if b"\\ud" in line.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return f"is not JSON: {error.msg[0].lower()}{error.msg[1:]} at column {error.colno}"
    except UnicodeDecodeError as error:
        return f"is not UTF-8 at byte {error.start + 1}"
    except UnicodeEncodeError:
        return "holds half a surrogate pair, which is no text"
    except RecursionError:
        return "is nested too deeply"
    return (
        None if isinstance(value, dict) else f"is a JSON {type(value).__name__}, expected an object"
    )


def _without(path: Path, bad: set[int], clean: Path) -> Path:
    with path.open("rb") as lines, clean.open("wb") as out:
        out.writelines(line for number, line in enumerate(lines, 1) if number not in bad)
    return clean
