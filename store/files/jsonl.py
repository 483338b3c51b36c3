"""Rows as lines of JSON."""

import json
import math
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from .raw_json import Raw, dumps


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as one line of JSON; times are ISO text, and NaN, which JSON lacks, is null.

    Values that are `Raw` are JSON already, and stand as they are.

    >>> json_line({"reward": 0.5, "text": "a b"})
    '{"reward": 0.5, "text": "a b"}'
    """
    return "{" + ", ".join(f"{dumps(str(k))}: {json_text(v)}" for k, v in row.items()) + "}"


def json_text(value: Any) -> str:
    """Return one value as `json_line` writes it."""
    if isinstance(value, Raw):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    return value.hex() if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value
