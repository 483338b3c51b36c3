"""Classify why a rollout failed, from the texts in its row."""

from typing import Literal

import polars as pl

from .body import Explained
from .decorator import operator

Failure = Literal["out_of_context", "sandbox", "timeout", "tool_error", "other"]
"""Kinds of failure, in the order in which they are checked."""

_SIGNS = {
    "out_of_context": r"out of context|context[ _](length|window|limit)|maximum context|"
    r"max(imum)?[ _](model|seq\w*)[ _]len|(prompt|sequence|request) is too long|too many tokens",
    "sandbox": r"sandbox|cannot be confined|code under test",
    "timeout": r"time[ _]?d?[ _]?out|timeout|took longer than|deadline",
    "tool_error": r"\btools?\b|tool[ _](call|error)|function[ _]call",
}
"""What the texts of each kind contain, in any case (regular expressions in Rust's dialect)."""
_GOOD = ("stop", "length", "eos", "end_turn", "tool_calls")
_FAILED = ("error", "failed", "abort", "aborted")


@operator("derive", writes=("failure",))
def failure_kind() -> pl.Expr:
    """Set `failure` to why a rollout failed, NULL where it did not.

    One of `out_of_context`, `sandbox`, `timeout`, `tool_error` and `other`, by the words in
    `finish_reason` and `drop_reason`. Rows that ended with `stop` or `length` and have no
    `drop_reason` did not fail.

    >>> rows = pl.DataFrame({"experience_id": list("abc"),
    ...                      "finish_reason": ["stop", "error", "tool_error"],
    ...                      "drop_reason": [None, "it took longer than 5 s", None]})
    >>> rows.pipe(failure_kind())["failure"].to_list()
    [None, 'timeout', 'tool_error']
    """
    return _kind().alias("failure")


@operator("filter")
def drop_failed(*, kinds: list[Failure] | None = None) -> Explained:
    """Drop rows of rollouts that failed, or only those that failed in one of these ways.

    The kinds are those of `failure_kind`; without `kinds`, all are dropped.

    >>> rows = pl.DataFrame({"experience_id": list("ab"), "finish_reason": ["error", "error"],
    ...                      "drop_reason": ["tool `search` failed: 503", "the sandbox broke"]})
    >>> drop_failed(kinds=["tool_error"]).split(rows)[1].select("experience_id", "reason").rows()
    [('a', 'tool_error: tool `search` failed: 503')]
    """
    kind = _kind()
    goes = kind.is_not_null() if kinds is None else kind.is_in(list(kinds))
    said = pl.coalesce("drop_reason", "finish_reason")
    return Explained(~goes.fill_null(value=False), reason=pl.format("{}: {}", kind, said))


def _kind() -> pl.Expr:
    finished, dropped = pl.col("finish_reason"), pl.col("drop_reason")
    # engines have few names for a good end, and many for a bad one
    odd = pl.when(~finished.is_in(_GOOD)).then(finished)
    text = pl.concat_str(odd, dropped, separator=" ", ignore_nulls=True)
    found = pl.when(text == "").then(pl.lit(None, pl.String))
    for kind, signs in _SIGNS.items():
        found = found.when(text.str.contains(f"(?i){signs}")).then(pl.lit(kind))
    return found.when(dropped.is_not_null() | odd.is_in(_FAILED)).then(pl.lit("other"))
