"""Redaction: addresses, numbers and keys that must not be trained on are replaced by their kind."""

from typing import Literal

import polars as pl

from ..store.errors import OperatorError
from .decorator import operator

Private = Literal["key", "email", "ip", "phone"]
"""Kinds of private data, in the order in which they are replaced."""

_BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_PATTERNS: dict[Private, str] = {
    "key": r"(?s:-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----)"
    r"|\b(?:sk|rk|pk)[-_][A-Za-z0-9_-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\b(?:gh[pousr]_|github_pat_|hf_|glpat-|xox[abprs]-)[A-Za-z0-9_-]{16,}"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
    "email": r"(?i)\b[a-z0-9._%+-]+@[a-z0-9-]+(?:\.[a-z0-9-]+)*\.[a-z]{2,}\b",
    "ip": rf"\b(?:{_BYTE}\.){{3}}{_BYTE}\b|(?i:\b(?:[0-9a-f]{{1,4}}:){{7}}[0-9a-f]{{1,4}}\b)",
    "phone": r"\+\d{1,3}[ .-]\(?\d{1,4}\)?[ .-]?\d{3,4}[ .-]?\d{3,4}(?:[ .-]?\d{1,4})?\b"
    r"|\+\d{10,15}\b"
    r"|\(\d{3}\) ?\d{3}-\d{4}\b|\b\d{3}[-.]\d{3}[-.]\d{4}\b",
}


@operator("clean")
def redact(
    *,
    column: str = "response_text",
    kinds: list[Private] | None = None,
    patterns: dict[str, str] | None = None,
) -> pl.Expr:
    """Replace mail addresses, IP addresses, phone numbers and keys in a text by their kind.

    `kinds` are some of `key`, `email`, `ip` and `phone`; without it, all. `patterns` adds regular
    expressions (Rust's dialect) by name. Patterns find what looks like such data, no more: names
    and postal addresses stay. `num_private` counts what would be replaced.

    >>> rows = pl.DataFrame({"experience_id": ["a"], "response_text": ["ask ann@example.org"]})
    >>> rows.pipe(redact())["response_text"][0]
    'ask [EMAIL]'
    """
    text = pl.col(column)
    for name, pattern in _chosen(kinds, patterns).items():
        text = text.str.replace_all(pattern, f"[{name.upper()}]")
    return text


@operator("derive", writes=("num_private",))
def num_private(
    *,
    column: str = "response_text",
    kinds: list[Private] | None = None,
    patterns: dict[str, str] | None = None,
) -> pl.Expr:
    """Set `num_private` to how many places of a text `redact` replaces.

    >>> rows = pl.DataFrame({"experience_id": ["a"], "response_text": ["10.0.0.1, 10.0.0.2"]})
    >>> rows.pipe(num_private())["num_private"].to_list()
    [2]
    """
    text, count = pl.col(column), pl.lit(0, pl.UInt32)
    for name, pattern in _chosen(kinds, patterns).items():
        count += text.str.count_matches(pattern)
        text = text.str.replace_all(pattern, f"[{name.upper()}]")
    return count.cast(pl.Int64).alias("num_private")


def _chosen(kinds: list[Private] | None, patterns: dict[str, str] | None) -> dict[str, str]:
    chosen: dict[str, str] = {k: p for k, p in _PATTERNS.items() if kinds is None or k in kinds}
    for name, pattern in (patterns or {}).items():
        try:
            matches = pl.Series([""]).str.contains(pattern)[0]
        except pl.exceptions.PolarsError as error:
            raise OperatorError(f"pattern `{name}` {pattern!r} does not parse: {error}") from error
        if matches:
            raise OperatorError(f"pattern `{name}` {pattern!r} matches the empty text")
        chosen[name] = pattern
    if not chosen:
        raise OperatorError("nothing to redact: name `kinds`, `patterns` or neither")
    return chosen
