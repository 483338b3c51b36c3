"""Export: rows of the store as files that other trainers load, written whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import ConfigError, InputError, JobError, QueryError, RlakeError
from ..query import query_error
from ..records import Message
from ..store import Store
from .filling import look_up
from .lines import json_line
from .reading import BATCH_ROWS

_TALK = ("messages", "prompt_text", "response_text", "tools")

Line = dict[str, Any]


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    path: Path
    rows: int
    left_out: int
    """Rows that were selected and have nothing to write: no text, or two equal answers."""


def export_sft(
    store: Store, out: str | Path, *, where: str | None = None, sql: str | None = None
) -> Exported:
    """Write conversations as lines of `{"prompt": [messages], "completion": [messages]}`.

    The completion is the last assistant message. Rows come from `experiences` that were not
    dropped and for which `where` holds, or from a SELECT that gives `messages`, or `prompt_text`
    and `response_text`. This is the conversational format of TRL's SFTTrainer.

    Raises QueryError, InputError when there is nothing to write, JobError when writing fails.
    """
    _one_of(where, sql)
    kept = f"drop_reason IS NULL AND ({where}\n)" if where else "drop_reason IS NULL"
    query = sql or f"SELECT {', '.join(_TALK)} FROM experiences WHERE {kept}"
    given = store.sql(query).columns
    if "messages" not in given and not {"prompt_text", "response_text"} <= set(given):
        raise QueryError(
            "the SELECT for sft must give `messages`, or `prompt_text` and `response_text`; "
            f"got {_names(given)}"
        )
    return _write_lines(Path(out), "sft", (_sft_line(r) for b in _batches(store, query) for r in b))


def export_dpo(
    store: Store, out: str | Path, *, where: str | None = None, sql: str | None = None
) -> Exported:
    """Write pairs as lines of `{"prompt": [...], "chosen": [...], "rejected": [...]}`.

    Pairs come from `preferences` for which `where` holds, or from a SELECT that gives `chosen_id`
    and `rejected_id`. The prompt is what both conversations begin with. This is the conversational
    format of TRL's DPOTrainer. Raises as `export_sft` does.
    """
    _one_of(where, sql)
    query = sql or "SELECT * FROM preferences" + (f" WHERE ({where}\n)" if where else "")
    given = store.sql(query).columns
    if not {"chosen_id", "rejected_id"} <= set(given):
        raise QueryError(
            f"the SELECT for dpo must give `chosen_id` and `rejected_id`; got {_names(given)}"
        )
    return _write_lines(Path(out), "dpo", _dpo_lines(store, query))


def export_experiences(
    store: Store, out: str | Path, *, where: str | None = None, sql: str | None = None
) -> Exported:
    """Write all columns of `experiences` for which `where` holds, or any SELECT.

    The suffix of `out` says how: `.parquet` or `.jsonl`.

    Raises as `export_sft` does.
    """
    _one_of(where, sql)
    query = sql or "SELECT * FROM experiences" + (f" WHERE ({where}\n)" if where else "")
    path = Path(out)
    if path.suffix != ".parquet":
        return _write_lines(path, "experiences", (r for b in _batches(store, query) for r in b))
    _refuse_folder(path)
    rows = 0
    with _whole(path) as part, _reading():
        reader = store.sql(query).to_arrow_reader(BATCH_ROWS)
        with pq.ParquetWriter(part, reader.schema) as writer:
            for batch in reader:
                writer.write_batch(batch)
                rows += batch.num_rows
        _refuse_nothing(rows, 0, "experiences")
    return Exported(path, rows, 0)


def _one_of(where: str | None, sql: str | None) -> None:
    if where is not None and sql is not None:
        raise ConfigError(
            "`--where` and `--sql` exclude each other; put the condition in the SELECT"
        )


def _names(columns: list[str]) -> str:
    return ", ".join(f"`{c}`" for c in columns)


def _batches(store: Store, query: str) -> Iterator[list[Line]]:
    with _reading():
        for batch in store.sql(query).to_arrow_reader(BATCH_ROWS):
            yield batch.to_pylist()


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except duckdb.Error as error:
        raise query_error(error) from error


def _conversation(row: Line) -> list[Message]:
    """Return the row's conversation, or nothing when it has none that ends with an answer."""
    if row.get("messages"):
        messages = json.loads(row["messages"])
        if messages and messages[-1].get("role") == "assistant":
            return messages
    prompt, response = row.get("prompt_text"), row.get("response_text")
    if prompt is None or response is None:
        return []
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _sft_line(row: Line) -> Line | None:
    messages = _conversation(row)
    if len(messages) < 2:
        return None
    line: Line = {"prompt": messages[:-1], "completion": messages[-1:]}
    return line | {"tools": json.loads(row["tools"])} if row.get("tools") else line


def _dpo_lines(store: Store, query: str) -> Iterator[Line | None]:
    for batch in _batches(store, query):
        ids = {row[name] for row in batch for name in ("chosen_id", "rejected_id")} - {None}
        stored = look_up(store, "experiences", "experience_id", ids, _TALK)
        for row in batch:
            yield _dpo_line(stored.get(row["chosen_id"]), stored.get(row["rejected_id"]))


def _dpo_line(chosen: Line | None, rejected: Line | None) -> Line | None:
    good, bad = _conversation(chosen or {}), _conversation(rejected or {})
    same = 0
    while same < min(len(good), len(bad)) and good[same] == bad[same]:
        same += 1
    if not same or same in (len(good), len(bad)):
        return None
    line: Line = {"prompt": good[:same], "chosen": good[same:], "rejected": bad[same:]}
    return line | {"tools": json.loads(chosen["tools"])} if chosen and chosen["tools"] else line


def _write_lines(path: Path, what: str, lines: Iterator[Line | None]) -> Exported:
    if path.suffix not in (".jsonl", ".ndjson"):
        known = "`.jsonl` or `.parquet`" if what == "experiences" else "`.jsonl`"
        raise ConfigError(f"`{what}` is written to {known}, got `{path}`")
    _refuse_folder(path)
    rows = left_out = 0
    with _whole(path) as part, part.open("w", encoding="utf-8") as out:
        for line in lines:
            if line is None:
                left_out += 1
                continue
            out.write(json_line(line) + "\n")
            rows += 1
        _refuse_nothing(rows, left_out, what)
    return Exported(path, rows, left_out)


def _refuse_nothing(rows: int, left_out: int, what: str) -> None:
    if not rows:
        more = f", of {left_out} that have no text or no difference" if left_out else ""
        raise InputError(f"no rows to export as {what}{more}; nothing was written")


def _refuse_folder(path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        where = f"`{path}` is a folder" if path.is_dir() else f"there is no folder `{path.parent}`"
        raise ConfigError(f"cannot write to `{path}`: {where}; name a file in a folder that exists")


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Give a place to write to that becomes the file when all went well, else is removed."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    except RlakeError:
        raise
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise JobError(f"cannot write `{path}`: {reason}; nothing was written") from error
    finally:
        part.unlink(missing_ok=True)
