"""Curves over training steps: read from the metrics of runs, and drawn."""

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from ...store import Store
from ...store.query import literal

Points = Sequence[tuple[float, float]]
CURVES = {
    "train/reward_mean": "Reward of the rows trained on",
    "explore/reward_mean": "Reward of the rollouts sampled",
    "eval/accuracy": "Accuracy on held-out tasks",
    "eval/reward_mean": "Reward on held-out tasks",
    "eval/loss": "Loss on held-out rows",
    "train/loss": "Loss",
    "train/accuracy": "Pairs ranked correctly",
    "train/reward_margin": "Margin between chosen and rejected",
    "train/kl": "KL divergence from the reference",
    "train/entropy": "Entropy of the policy, nats a token",
    "train/clip_fraction": "Share of tokens clipped",
    "train/grad_norm": "Norm of the gradient",
    "train/lag_mean": "Lag of the rows, steps",
    "tokens": "Tokens sampled a rollout",
}
"""The metrics that tell how a run went, and what their curves are called."""
_POINTS = 500
"""Most points of a curve; a longer one has the means of neighbors."""


def read(store: Store, run_ids: Sequence[str]) -> dict[str, dict[str, Points]]:
    """Return the curves of runs, by metric and run: at most 500 points each."""
    runs = ", ".join(map(literal, run_ids))
    found = store.sql(
        f"""
        WITH named AS (
            SELECT run_id, name, step, value FROM metrics_current WHERE run_id IN ({runs})
            UNION ALL
            SELECT run_id, 'tokens', step,
                   max(value) FILTER (name = 'explore/sampled_tokens')
                       / nullif(max(value) FILTER (name = 'explore/rows'), 0)
            FROM metrics_current WHERE run_id IN ({runs}) AND starts_with(name, 'explore/')
            GROUP BY run_id, step),
        placed AS (
            SELECT *, step * {_POINTS} // (1 + max(step) OVER (PARTITION BY run_id, name)) AS place
            FROM named WHERE value IS NOT NULL AND name IN {tuple(CURVES)})
        SELECT name, run_id, avg(step), avg(value) FROM placed
        GROUP BY name, run_id, place ORDER BY name, run_id, place
        """
    ).fetchall()
    # in the order of CURVES, which is that of the page
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in CURVES}
    for name, run_id, step, value in found:
        curves[name].setdefault(run_id, []).append((step, value))
    return {name: dict(of_runs) for name, of_runs in curves.items() if of_runs}


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
