"""Figures of texts: how long near-duplicates are looked for, and how many are found."""

from collections.abc import Iterator
from time import process_time

import numpy as np
import polars as pl

from rlake.operators import Operator, drop_near_duplicates, drop_near_embeddings

from .figure import Bench, Figure

_TEXTS = 100_000
_LENGTH = 200
_SHARE = 0.2
"""Of texts that are copies of earlier ones with two letters changed."""
_SYLLABLES = "ba ke li mo nu ra se ti vo za pel dor min kas tul fen gri hol on ar is ed ut"


def near_duplicates(bench: Bench) -> Iterator[Figure]:
    """Look for near-duplicates among many texts, none of which holds a number."""
    del bench
    rows, num_copies = _texts(np.random.default_rng(0))
    message = (
        f"{_TEXTS} texts of {_LENGTH} characters, {num_copies} of them edited copies; CPU time"
    )
    for op, budget in ((drop_near_duplicates(), 30.0), (drop_near_embeddings(), None)):
        yield from _measured(op, rows, num_copies, budget, message)


def _measured(
    op: Operator, rows: pl.DataFrame, num_copies: int, budget: float | None, told: str
) -> Iterator[Figure]:
    began = process_time()
    dropped = op.apply(rows).dropped
    seconds = process_time() - began
    yield Figure(op.name, round(seconds, 2), "s", budget, told)
    right = dropped.filter(pl.col("experience_id").str.starts_with("copy")).height
    yield Figure(f"{op.name}_precision", round(right / dropped.height, 4), "share", None, told)
    yield Figure(f"{op.name}_recall", round(right / num_copies, 4), "share", None, told)


def _texts(rng: np.random.Generator) -> tuple[pl.DataFrame, int]:
    """Make texts, and behind them copies with two letters changed, each of another text."""
    num_copies = int(_TEXTS * _SHARE)
    parts = np.array([f"{a}{b} " for a in _SYLLABLES.split() for b in _SYLLABLES.split()])
    num_texts = _TEXTS - num_copies
    texts = ["".join(rng.choice(parts, 50))[:_LENGTH] for _ in range(num_texts)]
    copies: list[str] = []
    for place in rng.permutation(num_texts)[:num_copies]:
        letters = list(texts[place])
        for at in rng.integers(0, _LENGTH, 2):
            letters[at] = "x"
        copies.append("".join(letters))
    ids = [f"text{i:06d}" for i in range(num_texts)] + [f"copy{i:06d}" for i in range(num_copies)]
    return pl.DataFrame({"experience_id": ids, "response_text": texts + copies}), num_copies
