"""Explorer and trainer as two commands on one store: the same run as one process."""

from pathlib import Path

import pytest
from support.jobs import finish, flags, run_here, start, told

import rlake


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 2])
def test_two_processes_reach_the_same_result_as_one(tmp_path: Path, ahead: int):
    sets = [f"schedule.max_ahead={ahead}", "trainer.steps=8"]
    (tmp_path / "two").mkdir()
    args = ["small.yaml", "--store", "lake", *flags(sets)]
    run_here(tmp_path / "one", *sets)
    explorer = start(tmp_path / "two", "explore", *args)
    trainer = start(tmp_path / "two", "train", *args)
    finish(trainer)
    finish(explorer)

    one, two = told(tmp_path / "one" / "lake"), told(tmp_path / "two" / "lake")
    assert one == two
    store = rlake.connect(tmp_path / "two" / "lake")
    [(lag,)] = store.sql("SELECT max(lag) FROM draws").fetchall()
    assert lag == ahead


@pytest.mark.slow
def test_a_trainer_whose_explorer_failed_ends_at_once_and_says_why(tmp_path: Path):
    rlake.connect(tmp_path / "lake")  # else nothing is made, and nobody is told
    args = ["small.yaml", "--store", "lake", "--set", "tasks.where=split = 'nowhere'"]
    trainer = start(tmp_path, "train", *args)
    explorer = start(tmp_path, "explore", *args)
    _, told_explorer = explorer.communicate(timeout=250)
    _, told_trainer = trainer.communicate(timeout=250)
    assert explorer.returncode == 2
    assert "no task matches" in told_explorer
    assert trainer.returncode == 1
    assert "`explore` of run `small` failed: no task matches" in told_trainer
