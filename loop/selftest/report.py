"""Reports of the self-test and the quickstart: an HTML page, and curves over training steps."""

import base64
import platform
from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path

import numpy as np

from ..report.curves import Points
from ..report.drawing import plot, smooth
from .run import Options, SelfTestResult

_BARS = " ▁▂▃▄▅▆▇█"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } th, td { padding: .3rem .8rem; border-bottom: 1px solid #ddd }
th, td { text-align: right } td:first-child, th:first-child { text-align: left }
img { max-width: 100% } code { background: #f4f4f4 }
"""
HEADS = ("task", "before", "after", "reward", "steps", "minutes", "tokens/s", "samples")
"""Column names of the table."""


def cells(one: SelfTestResult) -> tuple[str, ...]:
    """Return a task's row of the table."""
    return (
        one.task,
        f"{one.before:.1%}",
        f"{one.after:.1%}",
        f"{one.first_reward:.3f} -> {one.last_reward:.3f}",
        str(one.steps),
        f"{one.seconds / 60:.1f}",
        f"{one.tokens_per_second:,.0f}",
        f"{one.samples:,}",
    )


def notes(one: SelfTestResult) -> str:
    """Return which tasks the result was measured on, and where they come from."""
    if one.is_held_out:
        on = f"evaluated on {one.num_tasks} held-out tasks"
    else:
        on = (
            f"{one.num_trained_on} of the {one.num_tasks} evaluation tasks were also trained on, "
            "so this is not a held-out result"
        )
    return f"{one.task}: {on}; tasks: {one.data}"


def write_page(path: Path, made: Sequence[SelfTestResult], options: Options, image: Path) -> None:
    """Write the table, the curve, the options and the versions into an HTML page."""
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(one)) + "</tr>"
        for one in made
    )
    drawn = base64.b64encode(image.read_bytes()).decode()
    message = {
        name: value for name, value in vars(options).items() if value not in (None, (), False)
    }
    parts = ", ".join(f"{name} {version(name)}" for name in ("rlake", "torch", "transformers"))
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>rlake selftest</title>"
        f"<style>{_STYLE}</style><h1>rlake selftest</h1>"
        "<p>Before and after: the share of tasks solved. Reward: the mean over the rows of the "
        "first and of the last training steps.</p>"
        f"<ul>{''.join(f'<li>{escape(notes(one))}</li>' for one in made)}</ul>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f'<p><img alt="mean reward by training step" src="data:image/png;base64,{drawn}">'
        f"<p>Options: <code>{escape(str(message))}</code>. {escape(parts)}, Python "
        f"{platform.python_version()}, {escape(platform.machine())}.</html>\n",
        encoding="utf-8",
    )


def plot_rewards(path: Path, results: Sequence[SelfTestResult]) -> None:
    """Draw the rewards of all tasks by training step into a PNG file."""
    curves = {one.task: one.rewards for one in results if one.rewards}
    plot(path, curves, levels={}, title="rlake selftest", y_label="mean reward")


def text_plot(points: Points, *, width: int = 60, height: int = 8, top: float = 1.0) -> str:
    """Draw a curve of (step, value) with block characters, values from 0 to `top`.

    >>> print(text_plot([(1, 0.0), (2, 0.5), (3, 1.0)], width=3, height=2))
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
