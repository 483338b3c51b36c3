"""Curves over training steps, drawn as SVG and PNG."""

from collections.abc import Mapping
from io import StringIO
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from .curves import Points


def svg(title: str, curves: Mapping[str, Points]) -> str:
    """Return the curves of one metric, one for each run, as an `<svg>` element."""
    # text stays text, and two pictures of the same curves are the same bytes
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "text.parse_math": False}):
        figure = Figure(figsize=(5, 2.6), layout="constrained")
        axes = figure.subplots()
        # a run has the same color in every picture, whichever metrics it has
        for i, (name, points) in enumerate(curves.items()):
            steps, values = np.array(points).T
            # a line through one point is invisible
            marker = "." if len(points) == 1 else None
            axes.plot(steps, values, color=f"C{i}", alpha=0.25, linewidth=1, marker=marker)
            axes.plot(steps, smooth(values), color=f"C{i}", linewidth=1.8, label=name)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        axes.tick_params(labelsize=8)
        if len(curves) > 1:
            axes.legend(frameon=False, fontsize=8)
        written = StringIO()
        FigureCanvasSVG(figure).print_svg(written, metadata={"Date": None})
    text = written.getvalue()
    # without the XML prolog and doctype, which HTML does not allow within a page
    return text[text.index("<svg") :]


def plot(
    path: Path,
    curves: Mapping[str, Points],
    *,
    levels: Mapping[str, float],
    title: str,
    y_label: str,
) -> None:
    """Draw curves of (step, value), and horizontal levels with their names, into a PNG file."""
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
    """Return the mean of up to `width` neighbors around each value."""
    # fewer neighbors at both ends, so that the curve begins and ends where its values do
    half = width // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])
