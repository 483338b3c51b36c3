"""Figures of pipelines: a million rows through a chain, and a chain over more than memory holds."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from rlake.store import Store, connect

from .figure import Bench, Figure, identity, say, told

_MILLION = 1_000_000
_SCALAR_ROWS = 65_536
_TOKEN_ROWS = 200_000
_PEAK_BYTES = 1.5e9

_RUN = """
import json, sys
from time import perf_counter, process_time
import rlake
from rlake.pipelines import Pipeline
pipeline = Pipeline.from_yaml(sys.argv[2])
store = rlake.connect(sys.argv[1], create=False)
began, used = perf_counter(), process_time()
report = pipeline.run(store, full=True)
with open("/proc/self/status") as status:  # getrusage would tell of the process that started this
    peak = next(line for line in status if line.startswith("VmHWM")).split()[1]
print(json.dumps({
    "ms": 1000 * (perf_counter() - began),
    "cpu_ms": 1000 * (process_time() - used),
    "peak_bytes": 1024 * int(peak),
    "rows_in": report.rows_in,
    "rows_out": report.rows_out,
}))
"""
_CHAIN = """
name: {name}
source: {{table: experiences}}
operators:
- group_zscore
- {{keep: {{where: "reward > 0 OR rollout_index < 6"}}}}
- {{priority: {{expression: "abs(advantage)"}}}}
"""


def chain_1m(bench: Bench) -> Iterator[Figure]:
    """Take a million rows without tokens through an advantage, a filter and a priority."""
    store = _scalars(bench.folder / "chain_1m")
    for sink, budget in (("none", 5000.0), ("experience_values", None)):
        message = _run(
            store, "chain_1m", None if sink == "none" else "{table: experience_values}", times=3
        )
        rows_per_second = round(1000 * message["rows_in"] / message["ms"])
        workload = (
            f"{_MILLION} experiences of scalar columns through group_zscore, keep and priority, "
            f"sink {sink}; {rows_per_second} rows/s, {message['cpu_ms'] / 1000:.1f} s of CPU"
        )
        yield Figure(f"chain_1m_{sink}", round(message["ms"], 1), "ms", budget, workload)


def chain_200k(bench: Bench) -> Iterator[Figure]:
    """Take 200,000 rows with tokens through a chain to a file, in a process of its own."""
    store = Bench(bench.folder / "tokens", _TOKEN_ROWS).large
    done = _run(store, "chain_200k", f"{{file: {bench.folder / 'chain.parquet'}}}", times=1)
    workload = (
        f"{_TOKEN_ROWS} experiences of 256-512 tokens through group_zscore, keep and priority to a "
        f"Parquet file of {done['rows_out']} rows, in {done['ms'] / 1000:.1f} s; a fresh process"
    )
    yield Figure("chain_200k", done["peak_bytes"], "bytes of memory", _PEAK_BYTES, workload)


def _run(store: Store, name: str, sink: str | None, *, times: int) -> dict[str, float]:
    """Run the chain in fresh processes; return what the fastest tells."""
    text = _CHAIN.format(name=name) + (f"sink: {sink}\n" if sink else "")
    runs = (told([_RUN, store.root, text], name) for _ in range(times))
    return min(runs, key=lambda run: run["ms"])


def _scalars(folder: Path) -> Store:
    store = connect(folder)
    for start in range(0, _MILLION, _SCALAR_ROWS):
        n = min(_SCALAR_ROWS, _MILLION - start)
        rewards = np.random.default_rng(start).random(n) < 0.4
        rows = {
            **identity(start, n),
            "policy_version": np.arange(start, start + n) * 10 // _MILLION,
            "reward": rewards.astype(np.float64),
            "num_turns": np.ones(n, np.int64),
        }
        store.append("experiences", pa.table(rows))
        say(f"store of {_MILLION} rows: {start + n}")
    return store
