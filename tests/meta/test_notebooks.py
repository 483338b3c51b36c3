"""Notebooks are what users copy from: their code uses public modules only."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PUBLIC = {"rlake", *(f"rlake.{name}" for name in ("algorithms", "operators", "pipelines"))}
PUBLIC |= {"rlake.recipes"}


def code(notebook: Path) -> str:
    tree = json.loads(notebook.read_text(encoding="utf-8"))
    sources = ["".join(c["source"]) for c in tree["cells"] if c["cell_type"] == "code"]
    return "\n".join(sources)


def private_modules(text: str) -> set[str]:
    """Return the modules that code imports or names, other than public ones."""
    dotted = re.findall(r"\brlake(?:\.\w+)+", text)
    for names in re.findall(r"from rlake import (\([^)]*\)|.+)", text):
        dotted += [f"rlake.{name}" for name in re.findall(r"\w+", names)]
    return {module(name) for name in dotted} - PUBLIC


def module(dotted: str) -> str:
    """Return the part of a dotted name that is a module of the package."""
    parts = dotted.split(".")
    while len(parts) > 1:
        path = ROOT.joinpath(*parts[1:])
        if path.is_dir() or path.with_suffix(".py").exists():
            break
        parts.pop()
    return ".".join(parts)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_uses_public_modules_only(notebook: Path) -> None:
    assert private_modules(code(notebook)) == set()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("except rlake.store.RlakeError as error:", "rlake.store"),
        ("from rlake.store.replay import Sampler", "rlake.store.replay"),
        ("from rlake import store", "rlake.store"),
        ("import rlake.loop.cli", "rlake.loop.cli"),
        ("generator: {rlake.loop.recipes.toys:addition: {low: 0}}", "rlake.loop.recipes.toys"),
        ("from rlake.operators.rewards import boxed", "rlake.operators.rewards"),
    ],
)
def test_a_deeper_module_is_found(line: str, found: str) -> None:
    assert private_modules(line) == {found}
