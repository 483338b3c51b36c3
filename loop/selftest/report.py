"""The report of a quick verification as one HTML file that needs no other."""

import base64
import platform
from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path

from .run import Options, SelfTestResult

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } th, td { padding: .3rem .8rem; border-bottom: 1px solid #ddd }
th, td { text-align: right } td:first-child, th:first-child { text-align: left }
img { max-width: 100% } code { background: #f4f4f4 }
"""
HEADS = ("task", "before", "after", "reward", "steps", "minutes", "tokens/s", "samples")
"""Columns of the table."""


def cells(one: SelfTestResult) -> tuple[str, ...]:
    """Return what the table says of a task."""
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
    """Say what a task was measured on, and where its tasks are from."""
    if one.is_held_out:
        on = f"measured on {one.num_tasks} tasks that were never trained on"
    else:
        on = (
            f"{one.num_trained_on} of the {one.num_tasks} tasks that it is measured on were "
            "trained on, so this is not a held-out result"
        )
    return f"{one.task}: {on}; tasks: {one.data}"


def write_page(path: Path, made: Sequence[SelfTestResult], options: Options, image: Path) -> None:
    """Write the table, the curve, and what it was run with and on."""
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
        f"<!doctype html><html lang=en><meta charset=utf-8><title>rlake bench</title>"
        f"<style>{_STYLE}</style><h1>rlake bench</h1>"
        "<p>Before and after: the share of tasks solved. Reward: of the rows trained on, the mean "
        "of the first and of the last steps.</p>"
        f"<ul>{''.join(f'<li>{escape(notes(one))}</li>' for one in made)}</ul>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f'<p><img alt="mean reward by training step" src="data:image/png;base64,{drawn}">'
        f"<p>Options: <code>{escape(str(message))}</code>. {escape(parts)}, Python "
        f"{platform.python_version()}, {escape(platform.machine())}.</html>\n",
        encoding="utf-8",
    )
