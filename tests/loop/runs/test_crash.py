"""Pull the plug: a run that is killed and resumed is the run that was never killed."""

import random
import shutil
from pathlib import Path

import pytest
from support.jobs import flags, kill_at, run_here, start, told

import rlake

TWICE = """
    SELECT experience_id, epoch, count(*) FROM draws_current GROUP BY ALL HAVING count(*) > 1
"""
"""Rows trained on twice in an epoch: there must be none."""


Told = dict[str, list[tuple[object, ...]]]


def whole_run(folder: Path, *sets: str) -> Told:
    """The run that is never killed."""
    run_here(folder, *sets)
    return told(folder / "lake")


def killed_run(folder: Path, steps: list[int], *sets: str) -> Told:
    """The same run, killed when each of `steps` was drawn, and resumed."""
    folder.mkdir()
    args = ["run", "small.yaml", "--store", "lake", *flags(sets)]
    for i, step in enumerate(steps):
        process = start(folder, *args, *(["--resume"] if i else []), last_batch=step)
        kill_at(process, folder / "lake", step=step)
    run_here(folder, *sets, resume=True)
    return told(folder / "lake")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 16 steps that was never killed; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    whole_run(folder)
    return folder


def test_a_short_run_killed_in_mid_step_ends_as_if_never_killed(tmp_path: Path) -> None:
    short = ("trainer.steps=5", "trainer.checkpoint_every=2")
    killed = killed_run(tmp_path / "killed", [4], *short)
    assert killed == whole_run(tmp_path / "whole", *short)
    store = rlake.connect(tmp_path / "killed" / "lake")
    assert store.sql(TWICE).fetchall() == []
    [(attempts,)] = store.sql("SELECT count(DISTINCT attempt) FROM draws").fetchall()
    assert attempts == 2, "the kill came too late to undo a step"


@pytest.mark.slow
def test_a_killed_and_resumed_run_equals_one_that_was_never_killed(tmp_path: Path, whole: Path):
    wanted = told(whole / "lake")
    killed = killed_run(tmp_path / "killed", [7])
    assert killed == wanted
    assert len(wanted["losses"]) == 16
    assert any(loss for _, loss in wanted["losses"]), "a run that learns nothing shows nothing"

    store = rlake.connect(tmp_path / "killed" / "lake")
    assert store.sql(TWICE).fetchall() == []
    superseded = store.sql("SELECT count(*) FROM draws").fetchall()
    assert superseded[0][0] > len(wanted["drawn"]), "the kill came too late to undo a step"


@pytest.mark.slow
def test_the_audit_of_rows_trained_twice_finds_a_planted_one(tmp_path: Path, whole: Path):
    store = rlake.connect(shutil.copytree(whole / "lake", tmp_path / "lake"))
    [row] = store.sql("SELECT * FROM draws ORDER BY step, position LIMIT 1").pl().to_dicts()
    store.append("draws", [row | {"step": 16, "position": 999}])
    [(experience_id, epoch, times)] = store.sql(TWICE).fetchall()
    assert (experience_id, epoch, times) == (row["experience_id"], 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sets",
    [
        ["schedule.max_ahead=2"],
        pytest.param(
            ["schedule.max_ahead=1", "schedule.publish_every=2", "explorer.tasks_per_chunk=2"],
            marks=pytest.mark.long,
        ),
    ],
    ids=["two batches ahead", "every other version, small commits"],
)
def test_runs_ahead_of_the_trainer_survive_kills_as_well(tmp_path: Path, sets: list[str]):
    assert killed_run(tmp_path / "killed", [6, 13], *sets) == whole_run(tmp_path / "whole", *sets)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_killed_at_ten_random_moments_equals_one_that_was_never_killed(
    tmp_path: Path, whole: Path
):
    moments = sorted(random.Random(20260101).choices(range(1, 16), k=10))
    assert killed_run(tmp_path / "killed", moments) == told(whole / "lake")


MEASURED = "SELECT experience_id, token_ids FROM experiences WHERE run_id <> 'small' ORDER BY 1"
SCORES = """
    SELECT DISTINCT step, name, value FROM metrics WHERE job = 'evaluate' ORDER BY step, name
"""


@pytest.mark.slow
def test_a_run_that_is_measured_meanwhile_is_killed_and_ends_as_if_neither_had_been(
    tmp_path: Path, whole: Path
) -> None:
    every = "evaluate.every_steps=3"
    measured = whole_run(tmp_path / "whole", every)
    killed = killed_run(tmp_path / "killed", [4, 10], every)
    assert told(whole / "lake") == measured == killed
    lakes = [rlake.connect(tmp_path / name / "lake") for name in ("whole", "killed")]
    for query in (MEASURED, SCORES):
        one, other = (lake.sql(query).fetchall() for lake in lakes)
        assert one == other
        assert len(one) >= 7 * 3
