"""A run whose store was restored: it goes on from there, and not from what came after."""

from pathlib import Path

import jobs

import rlake
from rlake.loop.config import RunConfig, load
from rlake.loop.run import run
from rlake.store import Store
from rlake.store.snapshots import restore


def config(folder: Path) -> RunConfig:
    (folder / "small.yaml").write_text(jobs.CONFIG)
    return load(str(folder / "small.yaml"), ["trainer.keep_checkpoints=9", "name=demo"])


def test_a_restored_run_goes_on_as_it_did(tmp_path: Path) -> None:
    store: Store = rlake.connect(tmp_path / "lake")

    def listen(name: str, step: int, measured: object) -> None:
        if (name, step) == ("train", 7):
            store.snapshot("middle")

    run(store, config(tmp_path), listener=listen)
    wanted = jobs.told(store)
    restore(store, "middle", force=True)
    assert jobs.drawn(tmp_path / "lake") == 7
    run(store, config(tmp_path), resume=True)
    assert jobs.told(store) == wanted
    folder = tmp_path / "lake" / "runs" / "demo" / "checkpoints"
    assert {p.name for p in folder.iterdir()} >= {"step-000005", "undone-step-000010"}
