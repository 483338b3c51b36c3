"""Figures of starting Python with rlake."""

import os
import subprocess
import sys
from collections.abc import Iterator

from .figure import Bench, Figure, of


def imports(bench: Bench) -> Iterator[Figure]:
    """Import the package in fresh interpreters."""
    del bench
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}

    def once(statement: str) -> float:
        code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env=environment,
        )  # fmt: skip
        return 1000 * float(done.stdout)

    cases = (("import", "import rlake", 300.0), ("import_store", "import rlake.store", None))
    for name, statement, budget in cases:
        taken = [once(statement) for _ in range(6)][1:]
        yield of(taken, name, budget, f"`{statement}` in a fresh interpreter")
