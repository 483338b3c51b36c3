"""Draw the pictures of the page on scale from the lines of `bench.jsonl`.

Lines are those that `python -m bench simulation`, `scale` and `import_files` print.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
SCHEDULES = ("on_policy", "one_step_off", "asynchronous")
EXPLORERS = {1: 1, 4: 1, 16: 2, 64: 8, 256: 32}
"""Engines by explorers, as they were simulated."""
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)

Lines = Mapping[str, Sequence[float]]


def draw() -> None:
    """Write all pictures."""
    plt.rcParams.update({"svg.hashsalt": "rlake", "svg.fonttype": "none", "font.size": 9})
    found = [json.loads(line) for line in (FOLDER / "bench.jsonl").read_text().splitlines()]
    value = {one["figure"]: one["value"] for one in found}

    def simulated(name: str, metric: str) -> list[float]:
        return [value[f"simulation_{name}_{e}x{n}_{metric}"] for e, n in EXPLORERS.items()]

    speeds = {name: simulated(name, "steps_per_second") for name in SCHEDULES}
    plot("schedules", EXPLORERS, speeds, "explorers", "steps a second")
    idle = {
        part: [1 - share for share in simulated("asynchronous", f"{part}_idle")]
        for part in ("explorer", "engine", "trainer")
    }
    busy = {**idle, "store's writer": simulated("asynchronous", "writer_busy")}
    plot("busy", EXPLORERS, busy, "explorers, asynchronous", "busy, share of the time")
    costs = ("open", "append", "draw", "groups", "doctor", "maintain")
    growth = {name: [value[f"scale_{size}_{name}"] for size in SIZES] for name in costs}
    plot("growth", SIZES, growth, "experiences in the store", "milliseconds", log=True)


def plot(
    name: str,
    places: Mapping[int, int] | Sequence[int],
    lines: Lines,
    across: str,
    up: str,
    *,
    log: bool = False,
) -> None:
    """Write a picture of lines."""
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for label, values in lines.items():
        axes.plot([*places], values, marker="o", markersize=3, label=label)
    axes.set(xlabel=across, ylabel=up, xscale="log", yscale="log" if log else "linear")
    axes.set_xticks([*places], [f"{place:,}" for place in places], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    # without a date, so that the same lines give the same file
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw()
