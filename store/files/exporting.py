"""Export: rows of the store as files that other trainers load, written whole or not at all."""

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from ..errors import ConfigError, InputError, QueryError
from ..query import Console, query_error
from ..store import Store
from .filling import look_up
from .jsontext import Raw, dumps, elements, listed, one_line
from .rows import Progress
from .session import STEP_ROWS, in_batches
from .stored import stored_rows
from .turns import turns
from .writing import Line, kind_of, write_batches, write_lines

_TALK = ("messages", "prompt_text", "response_text", "tools")
Talk = list[str]
"""The text of each message, spelled as it came."""
Row = dict[str, object]


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    path: Path
    rows: int
    left_out: int
    """Rows that have nothing to write: no text, for kto no reward, for dpo two equal answers."""


@dataclass(frozen=True)
class Shape:
    """What a line of an export is made of, and how."""

    about: str
    """Half a line, for people who choose one."""
    line: Callable[[Row], Line | None] | None = None
    """Makes a line of a row; None for a row that has none."""
    reads: tuple[str, ...] = _TALK
    """Columns of `experiences` that it reads."""
    kept: str = "drop_reason IS NULL"
    """Which experiences it is made of."""
    needs: tuple[frozenset[str], ...] = (
        frozenset({"messages"}),
        frozenset({"prompt_text", "response_text"}),
    )
    """Columns of which a SELECT must give one set."""


def export_sft(
    store: Store, out: str | Path, *, where: str | None = None, sql: str | None = None
) -> Exported:
    """Write conversations as lines of `{"prompt": [messages], "completion": [messages]}`.

    The completion is the last assistant message. Rows come from `experiences` that were not
    dropped and for which `where` holds, or from a SELECT that gives `messages`, or `prompt_text`
    and `response_text`. This is the conversational format of TRL's SFTTrainer.

    Raises QueryError, InputError when there is nothing to write, JobError when writing fails.
    """
    return export(store, "sft", out, where=where, sql=sql)


def export_dpo(
    store: Store, out: str | Path, *, where: str | None = None, sql: str | None = None
) -> Exported:
    """Write pairs as lines of `{"prompt": [...], "chosen": [...], "rejected": [...]}`.

    Pairs come from `preferences` for which `where` holds, or from a SELECT that gives `chosen_id`
    and `rejected_id`. The prompt is what both conversations begin with. This is the conversational
    format of TRL's DPOTrainer. Raises as `export_sft` does.
    """
    return export(store, "dpo", out, where=where, sql=sql)


def export_experiences(
    store: Store, out: str | Path, *, where: str | None = None, sql: str | None = None
) -> Exported:
    """Write all columns of `experiences` for which `where` holds, or any SELECT.

    Raises as `export_sft` does.
    """
    return export(store, "experiences", out, where=where, sql=sql)


def export(
    store: Store,
    what: str,
    out: str | Path,
    *,
    where: str | None = None,
    sql: str | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write one of EXPORTS to a file or folder, whose suffix says how: see `writing.SUFFIXES`.

    Rows are those of `where`, or of a SELECT that gives what the export is made of. Raises
    QueryError, ConfigError, InputError when there is nothing to write, JobError when writing fails.
    """
    if where is not None and sql is not None:
        raise ConfigError(
            "`--where` and `--sql` exclude each other; put the condition in the SELECT"
        )
    path, shape = Path(out), EXPORTS[what]
    kind_of(path, what)
    lake = store if store.is_past else store.at(store.versions())  # it may be read twice
    console = stored_rows(lake)
    query = sql or _query(what, shape, where)
    columns = console.sql(query).columns
    given = set(columns)
    if shape.needs and not any(needed <= given for needed in shape.needs):
        needs = ", or ".join(" and ".join(f"`{c}`" for c in sorted(n)) for n in shape.needs)
        names = ", ".join(f"`{c}`" for c in columns)
        raise QueryError(f"the SELECT for {what} must give {needs}; got {names}")
    left_out = 0

    def chunks() -> Iterator[list[Line]]:
        nonlocal left_out
        left_out = done = nbytes = 0
        for batch in _batches(console, query):
            lines = list(_lines(lake, what, shape, batch))
            left_out += lines.count(None)
            done += batch.num_rows
            nbytes += batch.nbytes
            if progress is not None:
                progress("writing", done, nbytes)
            yield [line for line in lines if line is not None]

    try:
        if shape.line is None and what == "experiences":
            schema = console.sql(query).limit(0).to_arrow_table().schema
            rows = write_batches(path, schema, _batches(console, query), what)
        else:
            rows = write_lines(path, chunks, what)
    except InputError as error:
        if str(error) != "no rows":
            raise
        more = f", of {left_out} that have no text, no reward or no difference" if left_out else ""
        raise InputError(f"no rows to export as {what}{more}; nothing was written") from None
    return Exported(path, rows, left_out)


def _query(what: str, shape: Shape, where: str | None) -> str:
    if what == "dpo":
        return "SELECT * FROM preferences" + (f" WHERE ({where}\n)" if where else "")
    if what == "experiences":
        return "SELECT * FROM experiences" + (f" WHERE ({where}\n)" if where else "")
    kept = f"{shape.kept} AND ({where}\n)" if where else shape.kept
    return f"SELECT {', '.join(shape.reads)} FROM experiences WHERE {kept}"


def _batches(console: Console, query: str) -> Iterator[pa.RecordBatch]:
    with _reading():
        yield from in_batches(console.sql(query).to_arrow_reader(STEP_ROWS))


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except duckdb.Error as error:
        raise query_error(error) from error


def _lines(store: Store, what: str, shape: Shape, batch: pa.RecordBatch) -> Iterator[Line | None]:
    rows = batch.to_pylist()
    if what == "dpo":
        yield from _pairs(store, rows)
        return
    assert shape.line is not None, "what has lines makes them"
    for row in rows:
        yield shape.line(row)


def _conversation(row: Row) -> Talk:
    """Return the row's conversation, or nothing when it has none that ends with an answer."""
    text = row.get("messages")
    if text:
        talk = elements(one_line(str(text)))
        if talk and _message(talk[-1]).get("role") == "assistant":
            return talk
    prompt, response = row.get("prompt_text"), row.get("response_text")
    if prompt is None or response is None:
        return []
    asked, said = {"role": "user", "content": prompt}, {"role": "assistant", "content": response}
    return [dumps(asked), dumps(said)]


def _message(text: str) -> dict[str, object]:
    return json.loads(text)


def _tools(row: Row) -> dict[str, Any]:
    return {"tools": one_line(str(row["tools"]))} if row.get("tools") else {}


def _sft(row: Row) -> Line | None:
    talk = _conversation(row)
    if len(talk) < 2:
        return None
    return {"prompt": listed(talk[:-1]), "completion": listed(talk[-1:])} | _tools(row)


def _kto(row: Row) -> Line | None:
    line = _sft(row)
    if line is None or row.get("label") is None:
        return None
    tools = {k: line[k] for k in ("tools",) if k in line}
    return {
        "prompt": line["prompt"],
        "completion": line["completion"],
        "label": row["label"],
    } | tools


def _chat(row: Row) -> Line | None:
    talk = _conversation(row)
    if not talk:
        return None
    has_text = row.get("messages") and len(talk) == len(elements(str(row["messages"])))
    whole: Raw = one_line(str(row["messages"])) if has_text else listed(talk)
    return {"messages": whole} | _tools(row)


def _sharegpt(row: Row) -> Line | None:
    said = turns([_message(m) for m in _conversation(row)])
    if not said:
        return None
    system = {"system": said.pop(0)["value"]} if said[0]["from"] == "system" else {}
    return {"conversations": said} | system | _tools(row)


def _pairs(store: Store, rows: list[Row]) -> Iterator[Line | None]:
    ids = {str(row[name]) for row in rows for name in ("chosen_id", "rejected_id") if row[name]}
    stored = look_up(store, "experiences", "experience_id", ids, _TALK)
    for row in rows:
        yield _pair(stored.get(str(row["chosen_id"])), stored.get(str(row["rejected_id"])))


def _pair(chosen: Row | None, rejected: Row | None) -> Line | None:
    good, bad = _conversation(chosen or {}), _conversation(rejected or {})
    same = 0
    while same < min(len(good), len(bad)) and _message(good[same]) == _message(bad[same]):
        same += 1
    if not same or same in (len(good), len(bad)):
        return None
    pair = {
        "prompt": listed(good[:same]),
        "chosen": listed(good[same:]),
        "rejected": listed(bad[same:]),
    }
    return pair | _tools(chosen or {})


_LABELLED: Collection[str] = (*_TALK, "reward > 0 AS label")

EXPORTS = {
    "sft": Shape('{"prompt", "completion"}: conversations and their last answer, for TRL', _sft),
    "dpo": Shape(
        '{"prompt", "chosen", "rejected"}: the pairs of `preferences`, for TRL',
        needs=(frozenset({"chosen_id", "rejected_id"}),),
    ),
    "kto": Shape(
        '{"prompt", "completion", "label"}: true where the reward is above 0, for TRL',
        _kto,
        reads=tuple(_LABELLED),
        needs=(
            frozenset({"messages", "label"}),
            frozenset({"prompt_text", "response_text", "label"}),
        ),
    ),
    "chat": Shape('{"messages", "tools"}: whole conversations, as OpenAI fine-tuning', _chat),
    "sharegpt": Shape('{"conversations": [{"from", "value"}], "system", "tools"}', _sharegpt),
    "experiences": Shape("all columns, or those of any SELECT", needs=()),
}
"""What can be exported, by name."""
