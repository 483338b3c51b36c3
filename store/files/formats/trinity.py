"""Trinity-RFT's SQL buffer: its columns, and of its blobs what can be read without unpickling.

A blob is `TRXP`, a version, two lengths, then a pickle of texts and settings, then the tensors as
safetensors (Trinity-RFT 0.6, `common/experience.py`). The tensors need no pickle; the pickle is
read by `pickled.plain_values`. Older blobs are one pickle of Python objects: they are not read.
"""

import json
import struct
from typing import Any

import numpy as np

from ...ids import content_id
from ..raw_json import Raw, dumps
from .format import LEFT_OUT, NOT_READ, TOKENS, Format, Ours, Row, aligned, short, wrong
from .safe_pickle import plain_values

_MAGIC, _VERSION = b"TRXP", 1
_HEADER = struct.Struct("<4sBQQ")
_TYPES = {"I32": "<i4", "I64": "<i8", "F32": "<f4", "F64": "<f8", "F16": "<f2", "BOOL": "?",
          "U8": "u1"}  # fmt: skip
_READ = ("tokens", "logprobs", "action_mask", "token_level_reward", "teacher_logprobs",
         "advantages")  # fmt: skip
_TOLD = {"prompt_length": int, "eid": dict, "messages": list, "tools": list, "metrics": dict,
         "prompt_text": str, "response_text": str}  # fmt: skip
_BROKEN = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError,
           struct.error)  # fmt: skip
"""What comes of following a blob that somebody, or a fault of a disk, made up."""
_OLD = "the blob is a pickle of Python objects, which can run any program"


def experiences(row: Row) -> list[Ours]:
    """Give one experience; what could not be read of it is told by LEFT_OUT or NOT_READ."""
    blob = row.get("experience_bytes")
    if not isinstance(blob, bytes) or not blob.startswith(_MAGIC):
        why = "no blob" if blob is None else _OLD
        if "message_list" in row:  # of a table for SFT
            return [{"messages": row.conversation("message_list"), NOT_READ: why}]
        return [{LEFT_OUT: why}]
    try:
        written, tensors = _parts(blob)
    except _BROKEN as error:
        raise wrong(f"the blob of `id` {row.get('id')} is broken: {error}") from None
    try:
        told, why = _told(plain_values(written)), None
    except (ValueError, LookupError, TypeError) as error:
        told, why = {}, f"texts and settings in the blob's pickle: {error}"
    if "0:chosen" in tensors:
        return [{LEFT_OUT: "a pair, which only tables for DPO have"}]
    try:
        return [_experience(row, told, tensors) | {NOT_READ: why or _unread(tensors)}]
    except _BROKEN as error:
        raise wrong(f"the blob of `id` {row.get('id')} is broken: {error}") from None


def _told(written: Any) -> dict[str, Any]:
    """Return what the pickle tells of the experience, in the types that it has there."""
    message = {k: v for k, v in written["items"][0].items() if v is not None}
    for name, kind in _TOLD.items():
        if not isinstance(message.get(name, kind()), kind):
            raise ValueError(f"`{name}` is {short(message[name])}")
    return message


def _parts(blob: bytes) -> tuple[bytes, dict[str, Any]]:
    """Return the pickle, unread, and the tensors by name."""
    _, version, num_pickled, num_tensors = _HEADER.unpack_from(blob)
    if version != _VERSION:
        raise ValueError(f"version {version}, expected {_VERSION}")
    start = _HEADER.size + num_pickled
    if start + num_tensors != len(blob):
        raise ValueError(f"{len(blob)} bytes, expected {start + num_tensors}")
    return blob[_HEADER.size : start], _tensors(blob[start:])


def _tensors(data: bytes) -> dict[str, Any]:
    """Read safetensors: the length of a JSON header, the header, the values."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    found = {}
    for name, info in header.items():
        if name == "__metadata__" or info["dtype"] not in _TYPES:
            continue
        begin, end = info["data_offsets"]
        values = np.frombuffer(data[8 + length + begin : 8 + length + end], _TYPES[info["dtype"]])
        found[name] = values.reshape(info["shape"])
    return found


def _unread(tensors: dict[str, Any]) -> str | None:
    names = sorted({n.split(":")[1] for n in tensors} - {*_READ, "returns"})
    return f"tensors: {', '.join(names)}" if names else None


def _experience(row: Row, told: dict[str, Any], tensors: dict[str, Any]) -> Ours:
    mine = {name: tensors[f"0:{name}"].tolist() for name in _READ if f"0:{name}" in tensors}
    tokens = mine.get("tokens", [])
    mask = mine.get("action_mask")
    size = len(mask if mask is not None else mine.get("logprobs", []))
    start = told.get("prompt_length", len(tokens) - size)
    eid = told.get("eid") or {}
    asked = {"batch": eid.get("batch"), "task": row.get("task_id")}
    conversation = told.get("messages") or _talk(told)
    has_prompt = bool(conversation) or told.get("prompt_text") is not None
    ours = aligned(tokens[:start], tokens[start:], logprobs=mine.get("logprobs"), mask=mask)
    ours |= {
        "messages": dumps(conversation),
        "prompt_text": told.get("prompt_text"),
        "response_text": told.get("response_text"),
        "tools": dumps(told["tools"]) if told.get("tools") else None,
        "task_metadata": None if has_prompt else dumps({"trinity": asked}),
        "group_id": f"imported/{content_id(asked['batch'], asked['task'])}",
        "policy_version": row.whole("model_version"),
        "reward": row.number("reward"),
        "metrics": _metrics(told.get("metrics")),
        "metadata": _metadata(row, told),
        "advantage": _same(mine.get("advantages")),
    }
    for theirs, our in (("token_level_reward", "token_rewards"), ("teacher_logprobs",) * 2):
        ours[our] = [0.0] * start + mine[theirs] if theirs in mine else None
    return ours


def _talk(told: dict[str, Any]) -> list[dict[str, str]]:
    asked, said = told.get("prompt_text"), told.get("response_text")
    conversation = [] if asked is None else [{"role": "user", "content": asked}]
    return (
        conversation
        if said is None or not conversation
        else [*conversation, {"role": "assistant", "content": said}]
    )


def _metrics(given: Any) -> list[dict[str, Any]] | None:
    named = given.items() if isinstance(given, dict) else ()
    return [
        {"name": str(n), "value": float(v)} for n, v in named if isinstance(v, int | float)
    ] or None


def _same(values: list[float] | None) -> float | None:
    """Return the one value that all tokens have, as they do in GRPO."""
    return values[0] if values and len(set(values)) == 1 else None


def _metadata(row: Row, told: dict[str, Any]) -> Raw:
    kept = {k: row.get(k) for k in ("id", "timestamp", "task_id", "run_id", "msg_id", "consumed")}
    more = {k: told[k] for k in ("eid", "info", "truncate_status") if told.get(k)}
    return Raw(json.dumps({"trinity": kept | more}, ensure_ascii=False, default=str))


TRINITY = Format(
    "trinity",
    "the SQL buffer of Trinity-RFT (SQLite); its pickles are not run",
    needs=(frozenset({"experience_bytes"}), frozenset({"message_list"})),
    columns=(
        "messages",
        "prompt_text",
        "response_text",
        "tools",
        "task_metadata",
        "group_id",
        "policy_version",
        "reward",
        "metrics",
        "metadata",
        "advantage",
        "token_rewards",
        "teacher_logprobs",
        *TOKENS,
    ),
    rows=experiences,
)
