"""Figures of starting Python with rlake."""

import os
from collections.abc import Iterator

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
