"""Clean texts: whitespace, Unicode, reasoning, stop strings."""

import re
from typing import Literal

import polars as pl

from ..store.errors import OperatorError
from .decorator import operator

_INVISIBLE = (
    r"[\x00-\x08\x0B\x0C\x0E-\x1F\x7F\u{AD}\u{200B}-\u{200F}\u{2028}-\u{202E}\u{2060}\u{FEFF}]"
)


@operator("clean")
def clean_whitespace(*, column: str = "response_text") -> pl.Expr:
    """Turn each run of spaces and tabs of a text column into one space; strip lines and the whole.

    More than one empty line becomes one.

    >>> rows = pl.DataFrame({"experience_id": ["a"], "response_text": [" 2 +  2 \\n\\n\\n= 4\\t"]})
    >>> rows.pipe(clean_whitespace())["response_text"][0]
    '2 + 2\\n\\n= 4'
    """
    text = pl.col(column).str.replace_all("\r\n?", "\n")
    text = text.str.replace_all(r"[^\S\n]+", " ").str.replace_all(r" ?\n ?", "\n")
    return text.str.replace_all(r"\n{3,}", "\n\n").str.strip_chars()


@operator("clean")
def normalize_unicode(
    *, column: str = "response_text", form: Literal["NFC", "NFKC"] = "NFC"
) -> pl.Expr:
    """Normalize Unicode, and remove invisible characters.

    `NFC` combines letters with their accents; `NFKC` also replaces compatibility characters, such
    as wide letters and ligatures, which changes powers (x² becomes x2). Control characters, soft
    hyphens and zero-width marks are removed; tabs and line ends are kept.

    >>> rows = pl.DataFrame({"experience_id": ["a"], "response_text": ["cafe\\u0301\\u200b"]})
    >>> rows.pipe(normalize_unicode())["response_text"][0]
    'café'
    """
    return pl.col(column).str.replace_all(_INVISIBLE, "").str.normalize(form)


@operator("clean")
def strip_think(*, column: str = "response_text", tag: str = "think") -> pl.Expr:
    """Remove reasoning between `<think>` and `</think>`.

    Where the end is missing, everything from `<think>` on is removed; where the start is missing (a
    chat template may put it into the prompt), everything up to `</think>`. `extract_reasoning` sets
    a column to the removed text.

    >>> rows = pl.DataFrame({"experience_id": list("ab"), "response_text": [
    ...     "<think>2 and 2</think>\\n4", "2 and 2 is </think> 4"]})
    >>> rows.pipe(strip_think())["response_text"].to_list()
    ['4', '4']
    """
    start, end = _tags(tag)
    text = pl.col(column)
    has_any = text.str.contains(f"{start}|{end}")
    closed = text.str.replace_all(rf"(?s){start}.*?{end}", "")
    rest = closed.str.replace(rf"(?s)^.*{end}", "").str.replace(rf"(?s){start}.*$", "")
    return pl.when(has_any).then(rest.str.strip_chars()).otherwise(text).alias(column)


@operator("derive", writes=("reasoning",), scope="row")
def extract_reasoning(*, column: str = "response_text", tag: str = "think") -> pl.Expr:
    """Set `reasoning` to the text that `strip_think` removes, NULL where there is none.

    >>> rows = pl.DataFrame({"experience_id": ["a"],
    ...                      "response_text": ["<think>2 and 2</think> 4 <think>or 5"]})
    >>> rows.pipe(extract_reasoning())["reasoning"][0]
    '2 and 2\\nor 5'
    """
    start, end = _tags(tag)
    text = pl.col(column)
    # the beginning that the prompt has, so that all thoughts look alike
    first = pl.concat_str(pl.lit(f"<{tag}>"), text)
    is_headless = text.str.contains(rf"(?s)^.*?{end}") & ~text.str.contains(
        rf"(?s)^.*?{start}.*?{end}"
    )
    whole = pl.when(is_headless).then(first).otherwise(text)
    found = whole.str.extract_all(rf"(?s){start}.*?(?:{end}|$)")
    inner = pl.element().str.replace_all(f"{start}|{end}", "").str.strip_chars()
    message = found.list.eval(inner.filter(inner != "")).list.join("\n")
    return pl.when(message != "").then(message).alias("reasoning")


@operator("clean")
def cut_at(*, stops: list[str], column: str = "response_text") -> pl.Expr:
    """Truncate a text before the first of some strings, as an engine does with `stop`.

    >>> rows = pl.DataFrame({"experience_id": ["a"], "response_text": ["A: 4\\nQ: 3+3?"]})
    >>> rows.pipe(cut_at(stops=["\\nQ:", "</s>"]))["response_text"][0]
    'A: 4'
    """
    if not stops or "" in stops:
        raise OperatorError(f"`stops` must be strings that are not empty, got {stops}")
    return pl.col(column).str.replace(rf"(?s)(?:{'|'.join(map(re.escape, stops))}).*$", "")


def _tags(tag: str) -> tuple[str, str]:
    if not re.fullmatch(r"\w+", tag):
        raise OperatorError(f"`tag` must be a word, as `think`, got {tag!r}")
    return rf"(?i:<{tag}>)", rf"(?i:</{tag}>)"
