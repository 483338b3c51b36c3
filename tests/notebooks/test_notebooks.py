"""The notebooks are the tutorials: each runs from top to bottom, and shows commands that work."""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from rlake.loop.cli import run_command
from rlake.loop.recipes.gsm8k import real
from rlake.store import connect

NOTEBOOKS = {path.stem: path for path in (Path(__file__).parents[2] / "notebooks").glob("*.ipynb")}
FIRST = "101_from_files_to_a_training_set"
IN_BRIEF = (FIRST,)
"""Those that the default tests run; the slow ones run the others."""
LONG = ("301_offline_sft_and_dpo", "302_a_new_algorithm_in_one_file", "303_staleness")
"""Those that train for a minute: they are among the long ones."""
SHORTENED = {
    "103_prioritized_replay": {"STEPS, BATCH = 500, 64": "STEPS, BATCH = 150, 64", "=30,": "=8,"},
    "204_curriculum_from_history": {'"steps": 45': '"steps": 12'},
    "401_a_new_workflow_and_reward": {"{steps: 40}": "{steps: 6}", "(1, 40)": "(1, 6)"},
    # What an agent through a client learns is what it would without: test_recording says so.
    "402_train_an_existing_agent": {"steps: 30": "steps: 6", "last > first + 0.1": "last > 0"},
    "403_schedules_compared": {"STEPS = 25": "STEPS = 5"},
}
"""What the slow tests replace, so that each cell runs and trains briefly; the long ones do not."""
WHOLE = ", whole"
"""Marks, behind its name, a notebook that the long tests run as it is."""


def among(name: str) -> Any:
    """A notebook as a parameter, with the tests that it is among."""
    marks = [pytest.mark.slow] * (name not in IN_BRIEF) + [pytest.mark.long] * is_long(name)
    return pytest.param(name, marks=marks)


def is_long(name: str) -> bool:
    return name in LONG or name.endswith(WHOLE)


@dataclass(frozen=True)
class Executed:
    """What running a notebook printed and showed, and the folders that it could write to."""

    text: str
    work: Path
    temporary: Path


def execute(
    notebook: Path, folder: Path, *, changes: Mapping[str, str] | None = None, **environment: str
) -> Executed:
    """Run all cells, some text changed, in an empty folder, with other folders to write to."""
    done = Executed("", folder / "work", folder / "temporary")
    places = {"HOME": folder / "home", "TMPDIR": done.temporary}
    for place in (done.work, *places.values()):
        place.mkdir()
    # Cells that run `rlake` as a command must find that of this environment.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    opened = nbformat.read(notebook, as_version=4)
    for old, new in (changes or {}).items():
        assert any(old in cell["source"] for cell in opened["cells"]), f"{notebook.stem}: no {old}"
        for cell in opened["cells"]:
            cell["source"] = cell["source"].replace(old, new)
    client = NotebookClient(opened, timeout=280, resources={"metadata": {"path": str(done.work)}})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PATH": path, **places, **environment}.items():
            patch.setenv(name, str(value))
        cells = client.execute()["cells"]
    shown = [_text(output) for cell in cells for output in cell.get("outputs", ())]
    return Executed("\n".join(shown), done.work, done.temporary)


def _text(output: dict[str, Any]) -> str:
    return output.get("text") or output.get("data", {}).get("text/plain", "")


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Executed]:
    """Run a notebook by name, once for all tests."""

    def once(name: str) -> Executed:
        place, changes = tmp_path_factory.mktemp("notebook"), SHORTENED.get(name)
        return execute(NOTEBOOKS[name.removesuffix(WHOLE)], place, changes=changes)

    return cache(once)


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    tree = json.loads(notebook.read_text(encoding="utf-8"))
    return [cell for cell in tree["cells"] if cell["cell_type"] == kind]


def blocks(notebook: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language in the notebook's prose."""
    prose = "\n".join("".join(cell["source"]) for cell in cells(notebook, "markdown"))
    return re.findall(rf"^```{language}\n(.*?)^```", prose, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_without_outputs(name: str) -> None:
    nbformat.validate(nbformat.read(NOTEBOOKS[name], as_version=4))
    for cell in cells(NOTEBOOKS[name], "code"):
        assert (cell["outputs"], cell["execution_count"], cell["metadata"]) == ([], None, {})


@pytest.mark.parametrize(
    "name", [among(name) for name in sorted([*NOTEBOOKS, *(name + WHOLE for name in SHORTENED)])]
)
def test_a_notebook_runs_and_leaves_nothing_where_it_is_run(
    name: str, executed: Callable[[str], Executed]
) -> None:
    assert not list(executed(name).work.iterdir())


def test_the_first_notebook_says_on_which_data_it_runs(executed: Callable[[str], Executed]) -> None:
    files = real()
    said = f"GSM8K, in {files.folder}" if files else "a generated stand-in for GSM8K"
    assert executed(FIRST).text.startswith(said)


@pytest.mark.slow
def test_the_first_notebook_runs_without_the_data_and_says_so(tmp_path: Path) -> None:
    done = execute(NOTEBOOKS[FIRST], tmp_path, RLAKE_DATA=str(tmp_path))
    assert f"a generated stand-in for GSM8K, in gsm8k: {tmp_path}/gsm8k does not exist" in done.text


@pytest.mark.slow
def test_the_commands_that_the_first_notebook_shows_do_what_its_cells_do(
    executed: Callable[[str], Executed],
    gsm8k: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLAKE_STORE", "lake")
    [pipeline] = blocks(NOTEBOOKS[FIRST], "yaml")
    Path("right_and_wrong.yaml").write_text(pipeline)
    shown = "\n".join(blocks(NOTEBOOKS[FIRST], "bash")).replace("$GSM8K", str(gsm8k))
    for command in re.split(r"^(?=rlake )", shown, flags=re.MULTILINE)[1:]:
        assert run_command(shlex.split(command)[1:]) == 0

    [made] = executed(FIRST).temporary.glob("rlake-101-*")
    assert told(Path("lake")) == told(made / "lake")
    for name in ("sft.jsonl", "dpo.jsonl"):
        assert Path(name).read_text() == (made / name).read_text()


def told(place: Path) -> list[list[tuple[Any, ...]]]:
    """Return what two stores must agree on."""
    store = connect(place, create=False)
    queries = (
        "SELECT task_id, split FROM tasks",
        "SELECT experience_id, task_id, reward, metadata FROM experiences",
        "SELECT chosen_id, rejected_id, source FROM preferences",
        "SELECT experience_id, operator, reason FROM drops",
        "SELECT name FROM snapshots",
    )
    found = [store.sql(f"{query} ORDER BY ALL").fetchall() for query in queries]
    assert all(found), "an empty table proves nothing"
    return found
