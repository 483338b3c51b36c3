"""Cleaning: the same rows, with better values."""

import polars as pl

from .decorator import operator


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
