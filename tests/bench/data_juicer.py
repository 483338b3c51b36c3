"""Figures of a chain of Data-Juicer's operators: in this process, and in its own executor."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from polars.testing import assert_frame_equal

from rlake.operators import data_juicer as operator
from rlake.store.errors import JobError

from .figure import Bench, Figure, timed, told

_TEXTS = 20_000
_CHAIN: list[dict[str, dict[str, Any]]] = [
    {"whitespace_normalization_mapper": {}},
    {"text_length_filter": {"min_len": 20, "max_len": 150}},
    {"alphanumeric_filter": {"min_ratio": 0.8, "max_ratio": 0.9}},
    {"character_repetition_filter": {"rep_len": 5, "max_ratio": 0.3003}},
]
_THEIRS = """
import json, sys, time
from pathlib import Path
from data_juicer.core.data import NestedDataset
from data_juicer.ops import load_ops

folder, chain = Path(sys.argv[1]), json.loads(sys.argv[2])
rows = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
data = NestedDataset.from_list(rows)
began = time.perf_counter()
done = data.process(load_ops(chain))
taken = time.perf_counter() - began
(folder / "theirs.json").write_text(json.dumps({"seconds": taken, "rows": done.to_list()}))
print(taken)
"""


def data_juicer(bench: Bench) -> Iterator[Figure]:
    """Run four operators over 20,000 texts here and there; the same rows must come out."""
    texts = _texts()
    texts.rename({"response_text": "text"}).write_ndjson(bench.folder / "texts.jsonl")
    theirs = _run_there(bench.folder)
    chain = [operator(operator=one) for one in _CHAIN]

    def here(_: int = 0) -> pl.DataFrame:
        rows = texts
        for op in chain:
            rows = op.apply(rows).rows
        return rows

    _check(here(), theirs["rows"])
    seconds = min(timed(here, times=5, warm_up=0)) / 1000
    workload = f"{len(chain)} operators of Data-Juicer over {_TEXTS} texts, same rows, same stats"
    there = f"{workload}; its own executor, its own number of processes"
    yield Figure("data_juicer_executor", round(theirs["seconds"], 2), "s", None, there)
    yield Figure("data_juicer", round(seconds, 3), "s", None, f"{workload}; least of 5")
    ratio = round(theirs["seconds"] / seconds, 1)
    yield Figure("data_juicer_times_faster", ratio, "x", None, f"{workload}; 20 or more wanted")
    share = round(seconds / theirs["seconds"], 4)
    yield Figure("data_juicer_share", share, "of its time", 0.05, workload)


def _texts() -> pl.DataFrame:
    """Make texts of 3 to 30 words, some of them one word again and again."""
    rng = np.random.default_rng(0)
    words = np.array(
        ["natalia", "sold", "clips", "to", "48", "of", "her", "friends", "in", "april"]
    )
    made: list[str] = []
    for size, is_dull in zip(rng.integers(3, 31, _TEXTS), rng.random(_TEXTS) < 0.1, strict=True):
        chosen = rng.choice(words[:1] if is_dull else words, size)
        made.append("\u00a0".join(chosen[:2]) + " " + " ".join(chosen[2:]))
    ids = [f"e{i:05d}" for i in range(_TEXTS)]
    return pl.DataFrame({"experience_id": ids, "response_text": made})


def _run_there(folder: Path) -> dict[str, Any]:
    """Run its own executor, in a process and a folder of its own: it starts others and writes."""
    places = {"HF_DATASETS_CACHE": str(folder / "hf"), "HOME": str(folder)}
    program = [_THEIRS, str(folder), json.dumps(_CHAIN)]
    told(program, "Data-Juicer's own executor", cwd=folder, env=os.environ | places)
    return json.loads((folder / "theirs.json").read_text())


def _check(ours: pl.DataFrame, theirs: list[dict[str, Any]]) -> None:
    """Raise JobError unless the same rows were kept, with the same texts and statistics."""
    names = [n for n in ours.columns if n not in ("experience_id", "response_text")]
    expected = pl.DataFrame(
        [one | one["__dj__stats__"] for one in theirs], infer_schema_length=None
    ).select("experience_id", pl.col("text").alias("response_text"), *names)
    try:
        # its executor stores statistics as JSON, with ten decimals
        assert_frame_equal(ours.select(expected.columns), expected, rel_tol=0, abs_tol=1e-9)
    except AssertionError as error:
        raise JobError(
            f"{ours.height} rows came out here, {expected.height} there, and they differ: {error}"
        ) from error
