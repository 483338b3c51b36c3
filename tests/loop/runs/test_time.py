"""Runs whose store was restored, or goes two ways."""

from pathlib import Path

from support import jobs

import rlake
from rlake.loop.config import RunConfig, load
from rlake.loop.run import run
from rlake.loop.runs.job import run_folder
from rlake.store import Store
from rlake.store.snapshots import restore


def config(folder: Path, *settings: str) -> RunConfig:
    (folder / "small.yaml").write_text(jobs.CONFIG)
    return load(str(folder / "small.yaml"), ["trainer.keep_checkpoints=9", "name=demo", *settings])


def test_a_restored_run_goes_on_as_it_did(tmp_path: Path) -> None:
    store: Store = rlake.connect(tmp_path / "lake")

    def listen(name: str, step: int, measured: object) -> None:
        if (name, step) == ("train", 3):
            store.snapshot("middle")

    short = config(tmp_path, "trainer.steps=5", "trainer.checkpoint_every=2")
    run(store, short, listener=listen)
    wanted = jobs.told(store)
    restore(store, "middle", force=True)
    assert jobs.drawn(tmp_path / "lake") == 3
    run(store, short, resume=True)
    assert jobs.told(store) == wanted
    folder = tmp_path / "lake" / "runs" / "demo" / "checkpoints"
    assert {p.name for p in folder.iterdir()} >= {"step-000002", "undone-step-000004"}


def test_a_run_on_a_branch_is_one_of_its_own(tmp_path: Path) -> None:
    store = rlake.connect(tmp_path / "lake")
    short = config(tmp_path, "trainer.steps=3")
    trial = store.branch("trial")
    run(store, short)
    run(trial, short)
    assert jobs.told(store) == jobs.told(trial)
    folders = {str(p.relative_to(tmp_path / "lake")) for p in tmp_path.glob("lake/runs*/demo")}
    assert folders == {"runs/demo", "runs@trial/demo"}
    assert run_folder(trial, short) == tmp_path / "lake" / "runs@trial" / "demo"
    elsewhere = config(tmp_path, f"output={tmp_path}/out")
    assert run_folder(trial, elsewhere) == tmp_path / "out" / "demo@trial"
    assert run_folder(store, elsewhere) == tmp_path / "out" / "demo"
