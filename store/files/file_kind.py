"""Detect the kind of an input file, and check that it is readable."""

import codecs
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from glob import has_magic
from pathlib import Path

from pydantic_core import from_json

from ..errors import ConfigError, InputError, nearest
from .arrow_source import saved
from .compression import decompressed
from .duckdb_input import InputFile, InputSession
from .formats import FORMATS, Format
from .rejected_rows import Rejected
from .remote import fetch, scheme_of
from .stale_files import temporary_folder

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
    "hf": "a folder that Hugging Face datasets saved with save_to_disk, or loads",
}
"""The kinds that `format` may name, with short descriptions."""
_BEGINNINGS = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow",
    b"SQLite format 3\x00": "sqlite",
}
_LONGEST_LINE = 64 << 20
_SHOWN = 1 << 20
"""How much of a skipped line is recorded."""


@contextmanager
def open_input(
    path: str | Path,
    *,
    format: str | None = None,
    skip_invalid: bool = False,
    rejected: Rejected | None = None,
    split: str | None = None,
) -> Iterator[InputFile]:
    """Check a file before importing it; `.gz`, `.zst` and `.bz2` are decompressed first.

    An address of `remote.SOURCES`, such as `hf://OWNER/NAME`, is copied first, and so is a folder
    in the layout of the Hugging Face hub.

    `format` is one of KIND_NAMES or of FORMATS; otherwise the suffix, or the first bytes, determine
    the kind. With `skip_invalid`, invalid lines and rows are skipped and counted; `rejected`
    collects them, for one or several files. `split` selects one of a folder's datasets.

    Raises InputError for a file that is missing, empty or broken, ConfigError for an unknown
    format.

    >>> path = tmp / "tasks.jsonl"
    >>> _ = path.write_text('{"prompt_text": "1+1=", "answer": "2"}')
    >>> with open_input(path) as file:
    ...     file.kind
    'jsonl'
    """
    rejected = rejected if rejected is not None or not skip_invalid else Rejected()
    given, is_address = Path(path), scheme_of(path) is not None
    if not is_address and not given.exists():
        hint = "; `--glob` reads the files that it matches" if has_magic(str(given)) else ""
        raise InputError(f"`{given}` does not exist{hint}")
    with temporary_folder() as folder:
        if is_address or _is_hub_folder(given):
            copied = fetch(str(path), folder, split=split)
            folder = None if is_address else given
            yield replace(
                copied, folder=folder, format=FORMATS[format] if format else None, rejected=rejected
            )
            return
        path = decompressed(given, folder)
        kind, named = _kind(path, format)
        if path.is_dir() != (kind == "hf"):
            what = "a folder, expected a file" if path.is_dir() else "a file, expected a folder"
            raise InputError(f"`{given}` is {what}")
        files = tuple(saved(path, split)) if kind == "hf" else ()
        if kind == "jsonl":
            path = _parsing(path, given, folder, rejected)
        elif kind != "hf":
            _check_filled(path, given)
        folder = given if kind == "hf" else given.parent
        yield InputFile(path, given.name, kind, named, rejected, files, folder)


def _is_hub_folder(path: Path) -> bool:
    """Return whether a folder holds files of data, and is not one that `datasets` saved."""
    is_saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
    return path.is_dir() and not is_saved and any(f.suffix in KINDS for f in path.rglob("*"))


def _check_filled(path: Path, given: Path) -> None:
    try:
        if not path.stat().st_size:
            raise InputError(f"`{given}` is empty; nothing was imported")
    except OSError as error:
        raise InputError(f"cannot read `{given}`: {error.strerror}") from error


def _parsing(path: Path, given: Path, folder: Path, rejected: Rejected | None) -> Path:
    """Return a file of the lines that parse: the same file if all do."""
    _check_filled(path, given)
    try:
        bad = dict(_bad_lines(path))
    except OSError as error:
        raise InputError(f"cannot read `{given}`: {error.strerror}") from error
    if not bad:
        return path
    if rejected is None:
        line, reason = next(iter(bad.items()))
        more = f" ({len(bad)} such lines)" if len(bad) > 1 else ""
        raise InputError(
            f"`{given}` line {line} {reason}{more}; nothing was imported; fix the file, or leave "
            "such lines out with `--skip-invalid`"
        )
    return _without(path, given.name, bad, folder / "input.jsonl", rejected)


def _kind(path: Path, format: str | None) -> tuple[str, Format | None]:
    """Return the kind of file, and the named format if it is one."""
    if format is not None and format not in KIND_NAMES and format not in FORMATS:
        raise ConfigError(f"unknown format `{format}`{nearest(format, [*KIND_NAMES, *FORMATS])}")
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
    """Return the kind of a file by its first bytes, or None."""
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror}") from error
    return next((kind for begins, kind in _BEGINNINGS.items() if start.startswith(begins)), None)


def _bad_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number of each line that is not a JSON object, and why."""
    with path.open("rb") as lines:
        number = 0
        while line := lines.readline(_LONGEST_LINE):
            number += 1
            reason = why_bad(line) if line.strip() else None
            if reason:
                yield number, reason


def why_bad(line: bytes) -> str | None:
    """Return why a line is not a JSON object, or None if it is one."""
    # reading stops here: a file without line breaks must not fill the memory
    if len(line) == _LONGEST_LINE:
        return f"is longer than {_LONGEST_LINE >> 20} MiB"
    if line.startswith(codecs.BOM_UTF8):
        return "starts with a byte order mark, expected UTF-8 without one"
    try:
        # the parser of pydantic takes a fifth of the time, and accepts nothing that `json` refuses
        if isinstance(from_json(line), dict):
            return None
    except ValueError:  # not in the words of `json`, and some lines are JSON to it
        pass
    try:
        value = json.loads(line.decode())
        if b"\\ud" in line.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return f"is not JSON: {error.msg[0].lower()}{error.msg[1:]} at column {error.colno}"
    except UnicodeDecodeError as error:
        return f"is not UTF-8 at byte {error.start + 1}"
    except UnicodeEncodeError:
        return "holds half a surrogate pair, which is not text"
    except ValueError as error:  # an integer of thousands of digits
        return f"cannot be read: {str(error).partition(';')[0]}"
    except RecursionError:
        return "is nested too deeply"
    return (
        None if isinstance(value, dict) else f"is a JSON {type(value).__name__}, expected an object"
    )


def _without(path: Path, name: str, bad: dict[int, str], clean: Path, rejected: Rejected) -> Path:
    with path.open("rb") as lines, clean.open("wb") as out:
        for number, line in enumerate(lines, 1):
            if number in bad:
                content = line[:_SHOWN].decode(errors="backslashreplace").rstrip("\n")
                rejected.add(name, "line", number, bad[number], content)
            else:
                out.write(line)
    return clean
