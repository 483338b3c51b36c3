"""Measure the figures that are named, or all of them: a JSON object a line."""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from . import (
    care,
    chains,
    curricula,
    data_juicer,
    draws,
    engine,
    grpo,
    importing,
    imports,
    memory,
    offline,
    queries,
    recipes,
    scale,
    schedules,
    serving,
    simulation,
    staleness,
    steps,
    studio,
    texts,
    throughput,
    time,
    weight_updates,
    writing,
)
from .figure import Bench, Figure, say

FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "import": imports.imports,
    "question": imports.questions,
    "import_files": importing.import_files,
    "append": writing.append,
    "group_commit": writing.group_commit,
    "many_writers": writing.many_writers,
    "seen": writing.seen,
    "draw": draws.draw,
    "draw_2m": draws.draw_2m,
    "engine": engine.engine,
    "groups": queries.groups,
    "grpo": grpo.grpo,
    "tokens": queries.tokens,
    "memory": memory.memory,
    "offline": offline.offline,
    "step": steps.step,
    "snapshot": time.snapshots,
    "branch": time.branches,
    "commits": care.commits,
    "care": care.care,
    "similar": care.similar,
    "chain_1m": chains.chain_1m,
    "chain_200k": chains.chain_200k,
    "curricula": curricula.curricula,
    "data_juicer": data_juicer.data_juicer,
    "near_duplicates": texts.near_duplicates,
    "recipes": recipes.recipes,
    "scale": scale.scale,
    "schedules": schedules.schedules,
    "serving": serving.serving,
    "simulation": simulation.simulation,
    "studio_pages": studio.studio_pages,
    "studio_watchers": studio.studio_watchers,
    "staleness": staleness.staleness,
    "throughput": throughput.throughput,
    "weight_updates": weight_updates.weight_updates,
}
"""What can be measured, by name."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the figures that are named, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the large store")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.figures) - set(FIGURES))
    if unknown:
        parser.error(f"there is no figure `{unknown[0]}`; known are {', '.join(FIGURES)}")
    with tempfile.TemporaryDirectory(prefix="rlake-bench-") as folder:
        bench = Bench(Path(folder), chosen.rows)
        for name in chosen.figures or FIGURES:
            say(f"measuring {name}")
            for figure in FIGURES[name](bench):
                print(json.dumps(asdict(figure)), flush=True)


if __name__ == "__main__":
    main()
