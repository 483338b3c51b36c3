"""Figures of imports: CPU time of short questions and answers, by that of DuckDB's own copy.

Both run on one thread, in a process of their own, from the same file. DuckDB copies it to Parquet;
an import also validates, makes the tasks, IDs, groups and digests, and stores what it came from.
"""

import os
from collections.abc import Iterator

import duckdb

from .figure import Bench, Figure, told

SIZES = (100_000, 1_000_000)
BUDGET = 8.0
_ROWS = """
    SELECT 'What is ' || i || ' plus ' || (i * 7919) % 1000 || '?' AS prompt_text,
        'The answer is ' || (i + (i * 7919) % 1000) AS response_text,
        ((i * 31) % 10 < 4)::DOUBLE AS reward
    FROM range({size}) AS numbers(i)
"""
_IMPORT = """
import sys, time
from rlake.store import connect
from rlake.store.files import import_file
source, folder, table = sys.argv[1:]
store = connect(folder)
began = time.process_time()
done = import_file(store, source, table)
print('[%r, %r]' % (time.process_time() - began, done.rows))
"""
_COPY = """
import sys, time, duckdb
source, target = sys.argv[1:]
con = duckdb.connect()
con.execute("SET threads = 1")
began = time.process_time()
con.execute(f"COPY (SELECT * FROM '{source}') TO '{target}' (FORMAT parquet)")
print(time.process_time() - began)
"""
_MAPPED = {"experiences": "*", "tasks": "prompt_text, response_text AS answer"}


def import_files(bench: Bench) -> Iterator[Figure]:
    """Import the same rows from Parquet and from JSON lines, as experiences and as tasks."""
    for size in SIZES:
        for table, columns in _MAPPED.items():
            for kind in ("parquet", "jsonl"):
                yield from _compared(bench, size, table, columns, kind)


def _compared(bench: Bench, size: int, table: str, columns: str, kind: str) -> Iterator[Figure]:
    name = f"{table}_{kind}_{size}"
    source = bench.folder / f"{name}.{kind}"
    options = "FORMAT parquet" if kind == "parquet" else "FORMAT json"
    made = f"SELECT {columns} FROM ({_ROWS.format(size=size)})"
    duckdb.execute(f"COPY ({made}) TO '{source}' ({options})")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    call = (_IMPORT, str(source), str(bench.folder / name), table)
    ours, rows = told(call, "an import", env=environment)
    assert rows == size, f"{rows} of {size} rows were imported"
    call = (_COPY, str(source), str(bench.folder / f"{name}.copy.parquet"))
    theirs = told(call, "a copy", env=environment)
    what = f"{size} {table} of a short question and answer, from {kind}; CPU time of all threads"
    each = round(1e6 * ours / size, 2)
    yield Figure(f"import_{name}", each, "us of CPU a row", None, what)
    ratio = round(ours / theirs, 1)
    copied = f"{ours:.2f} and {theirs:.2f} s; DuckDB copies to Parquet"
    yield Figure(f"import_{name}_ratio", ratio, "x DuckDB's CPU", BUDGET, f"{what}; {copied}")
