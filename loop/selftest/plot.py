"""A curve over training steps, as a picture and in the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

Points = Sequence[tuple[float, float]]
_BARS = " ▁▂▃▄▅▆▇█"


def picture(
    path: Path,
    curves: Mapping[str, Points],
    *,
    levels: Mapping[str, float],
    title: str,
    y_label: str,
) -> None:
    """Draw curves of (step, value), and horizontal levels with their names, into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        steps, values = np.array(points).T
        [line] = axes.plot(steps, values, alpha=0.25, linewidth=1)
        axes.plot(steps, smooth(values), color=line.get_color(), linewidth=2, label=name)
    for i, (name, level) in enumerate(levels.items(), 1):
        axes.axhline(
            level, color=f"C{i}", linestyle="--", linewidth=1.2, label=f"{name}: {level:.2f}"
        )
    axes.set(xlabel="training step", ylabel=y_label, title=title, ylim=(0, 1.03))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(loc="lower right", frameon=False)
    FigureCanvasAgg(figure).print_figure(path, dpi=120)


def smooth(values: np.ndarray, width: int = 9) -> np.ndarray:
    """Return the mean of up to `width` neighbours around each value."""
    half = width // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def terminal(points: Points, *, width: int = 60, height: int = 8, top: float = 1.0) -> str:
    """Draw a curve of (step, value) with block characters, values from 0 to `top`.

    >>> print(terminal([(1, 0.0), (2, 0.5), (3, 1.0)], width=3, height=2))
     1.0 |  █
     0.0 | ██
    """
    steps, values = np.array(points, dtype=float).T
    places = np.linspace(steps[0], steps[-1], width)
    levels = np.interp(places, steps, smooth(values) if len(values) > width else values) / top
    rows = []
    for row in range(height - 1, -1, -1):
        filled = np.clip((levels * height - row) * 8, 0, 8).round().astype(int)
        label = f"{(row + 1) / height * top:4.1f}" if row == height - 1 else "    "
        label = f"{0.0:4.1f}" if row == 0 else label
        rows.append(f"{label} |" + "".join(_BARS[f] for f in filled).rstrip())
    return "\n".join(rows)
