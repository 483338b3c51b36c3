"""Figures of starting Python with rlake."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

from rlake.store import connect

from .figure import Bench, Figure, of, told


def imports(bench: Bench) -> Iterator[Figure]:
    """Import the package in fresh interpreters."""
    del bench
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}

    def milliseconds(statement: str) -> float:
        code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
        return 1000 * told([code], statement, env=environment)

    cases = (("import", "import rlake", 300.0), ("import_store", "import rlake.store", None))
    for name, statement, budget in cases:
        taken = [milliseconds(statement) for _ in range(6)][1:]
        yield of(taken, name, budget, f"`{statement}` in a fresh interpreter")


def questions(bench: Bench) -> Iterator[Figure]:
    """Ask a store one question from the command line: the CPU time of the whole process."""
    connect(bench.folder / "asked")
    environment = os.environ | {"RLAKE_STORE": str(bench.folder / "asked")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled

    def milliseconds(words: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "rlake.loop.cli", *words]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    for name, words in (("sql", ["sql", "SELECT 1"]), ("tables", ["tables"])):
        taken = [milliseconds(words) for _ in range(8)][1:]
        yield of(taken, f"question_{name}", 500.0, f"CPU time of `rlake {' '.join(words)}`")
