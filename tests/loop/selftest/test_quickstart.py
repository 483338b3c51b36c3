"""The first command that anyone runs: it does what the README says, and its hints can be pasted."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlake
from rlake.loop import cli

RLAKE = Path(sys.executable).with_name("rlake")
ACCURACIES = """
    SELECT run_id, batch, avg((reward >= 1)::INT) FROM experiences
    WHERE purpose = 'eval' GROUP BY ALL ORDER BY min(created_at)
"""


def quickstart(folder: Path, *args: str) -> str:
    """Run the command in a folder, and return what it printed."""
    done = subprocess.run(
        [RLAKE, "quickstart", *args], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_quickstart_learns_to_add_and_its_three_queries_can_be_pasted(tmp_path: Path):
    told = quickstart(tmp_path)
    store = rlake.connect(tmp_path / "quickstart" / "lake", create=False)
    (_, _, before), (_, _, warm), (_, _, after) = store.sql(ACCURACIES).fetchall()
    assert before <= 0.05
    assert after >= 0.85
    assert after - warm >= 0.35
    assert f"{warm:.1%}" in told
    assert f"{after:.1%}" in told
    picture = (tmp_path / "quickstart" / "reward.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000

    commands = re.findall(r"^\S*rlake sql .*$", told, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        pasted = subprocess.run(
            command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert pasted.returncode == 0, pasted.stderr
        assert pasted.stdout.strip()

    held_out = store.sql(
        "SELECT count(*) FROM draws_current d JOIN experiences e USING (experience_id) "
        "JOIN tasks t USING (task_id) WHERE t.split = 'eval'"
    ).fetchall()
    assert held_out == [(0,)], "a task that accuracy is measured on was trained on"


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_learn_as_well_within_the_budgets(tmp_path: Path, seed: int):
    [*_, line] = quickstart(tmp_path, "--seed", str(seed), "--json").splitlines()
    figures = json.loads(line)
    assert figures["accuracy_after"] >= 0.85
    assert figures["accuracy_after"] - figures["accuracy_warm_start"] >= 0.35
    assert figures["peak_memory_mb"] < 1536


def test_the_quickstart_never_writes_into_a_folder_that_holds_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    assert cli.run_command(["quickstart", str(tmp_path / "mine")]) == cli.MISUSED
    said = capsys.readouterr().err
    assert said == f"error: `{tmp_path / 'mine'}` exists and is not empty; name a new folder\n"
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes.txt"]
