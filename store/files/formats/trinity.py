"""Trinity-RFT's SQL buffer: its columns, and the parts of its blobs readable without unpickling.

A blob is `TRXP`, a version, two lengths, then a pickle of texts and settings, then the tensors as
safetensors (Trinity-RFT 0.6, `common/experience.py`). The tensors need no pickle; the pickle is
read by `safe_pickle.plain_values`. Older blobs are one pickle of Python objects: they are not read.
"""

import json
import struct
from typing import Any

import numpy as np

from ...ids import content_id
from ...raw_json import Raw, dumps
from .format import LEFT_OUT, NOT_READ, TOKENS, Format, Ours, Row, aligned, short, wrong
from .safe_pickle import plain_values

_MAGIC, _VERSION = b"TRXP", 1
_HEADER = struct.Struct("<4sBQQ")
_TYPES = {"I32": "<i4", "I64": "<i8", "F32": "<f4", "F64": "<f8", "F16": "<f2", "BOOL": "?",
          "U8": "u1"}  # fmt: skip
_READ = ("tokens", "logprobs", "action_mask", "token_level_reward", "teacher_logprobs",
         "advantages")  # fmt: skip
_TYPED = {"prompt_length": int, "eid": dict, "messages": list, "tools": list, "metrics": dict,
         "prompt_text": str, "response_text": str}  # fmt: skip
_BROKEN = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError,
           struct.error)  # fmt: skip
"""Errors of parsing a forged or damaged blob."""
_OLD = "the blob is a pickle of Python objects, which can run any program"


def experiences(row: Row) -> list[Ours]:
    """Return one experience; LEFT_OUT or NOT_READ says what could not be read."""
    blob = row.get("experience_bytes")
    if not isinstance(blob, bytes) or not blob.startswith(_MAGIC):
        why = "no blob" if blob is None else _OLD
        if "message_list" in row:  # of a table for SFT
            return [{"messages": row.conversation("message_list"), NOT_READ: why}]
        return [{LEFT_OUT: why}]
    try:
        pickled, tensors = _parts(blob)
    except _BROKEN as error:
        raise wrong(f"the blob of `id` {row.get('id')} is broken: {error}") from None
    try:
        given, why = _texts_and_settings(plain_values(pickled)), None
    except (ValueError, LookupError, TypeError) as error:
        given, why = {}, f"texts and settings in the blob's pickle: {error}"
    if "0:chosen" in tensors:
        return [{LEFT_OUT: "a pair, which only tables for DPO have"}]
    try:
        return [_experience(row, given, tensors) | {NOT_READ: why or _unread(tensors)}]
    except _BROKEN as error:
        raise wrong(f"the blob of `id` {row.get('id')} is broken: {error}") from None


def _texts_and_settings(written: Any) -> dict[str, Any]:
    """Return the experience's values in the pickle, checked for their types."""
    message = {k: v for k, v in written["items"][0].items() if v is not None}
    for name, kind in _TYPED.items():
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


def _experience(row: Row, given: dict[str, Any], tensors: dict[str, Any]) -> Ours:
    mine = {name: tensors[f"0:{name}"].tolist() for name in _READ if f"0:{name}" in tensors}
    tokens = mine.get("tokens", [])
    mask = mine.get("action_mask")
    size = len(mask if mask is not None else mine.get("logprobs", []))
    start = given.get("prompt_length", len(tokens) - size)
    eid = given.get("eid") or {}
    asked = {"batch": eid.get("batch"), "task": row.get("task_id")}
    conversation = given.get("messages") or _conversation(given)
    has_prompt = bool(conversation) or given.get("prompt_text") is not None
    ours = aligned(tokens[:start], tokens[start:], logprobs=mine.get("logprobs"), mask=mask)
    ours |= {
        "messages": dumps(conversation),
        "prompt_text": given.get("prompt_text"),
        "response_text": given.get("response_text"),
        "tools": dumps(given["tools"]) if given.get("tools") else None,
        "task_metadata": None if has_prompt else dumps({"trinity": asked}),
        "batch": batch if type(batch := asked["batch"]) is int and 0 <= batch < 2**31 else None,
        "group_id": f"imported/{content_id(asked['batch'], asked['task'])}",
        "policy_version": row.whole("model_version"),
        "reward": row.number("reward"),
        "metrics": _metrics(given.get("metrics")),
        "metadata": _metadata(row, given),
        "advantage": _same(mine.get("advantages")),
    }
    for theirs, our in (("token_level_reward", "token_rewards"), ("teacher_logprobs",) * 2):
        ours[our] = [0.0] * start + mine[theirs] if theirs in mine else None
    return ours


def _conversation(given: dict[str, Any]) -> list[dict[str, str]]:
    asked, said = given.get("prompt_text"), given.get("response_text")
    if asked is None:
        return []
    question = {"role": "user", "content": asked}
    return [question] if said is None else [question, {"role": "assistant", "content": said}]


def _metrics(metrics: Any) -> list[dict[str, Any]] | None:
    named = metrics.items() if isinstance(metrics, dict) else ()
    return [
        {"name": str(n), "value": float(v)} for n, v in named if isinstance(v, int | float)
    ] or None


def _same(values: list[float] | None) -> float | None:
    """Return the value that all tokens share, as in GRPO, or None."""
    return values[0] if values and len(set(values)) == 1 else None


def _metadata(row: Row, given: dict[str, Any]) -> Raw:
    kept = {k: row.get(k) for k in ("id", "timestamp", "task_id", "run_id", "msg_id", "consumed")}
    more = {k: given[k] for k in ("eid", "info", "truncate_status") if given.get(k)}
    return Raw(json.dumps({"trinity": kept | more}, ensure_ascii=False, default=str))


TRINITY = Format(
    "trinity",
    "the SQL buffer of Trinity-RFT (SQLite); its pickles are not run",
    needs=(frozenset({"experience_bytes"}), frozenset({"message_list"})),
    columns=("messages", "prompt_text", "response_text", "tools", "task_metadata", "group_id",
             "batch", "policy_version", "reward", "metrics", "metadata", "advantage",
             "token_rewards", "teacher_logprobs", *TOKENS),
    rows=experiences,
)  # fmt: skip
