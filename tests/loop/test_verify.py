"""What a step was trained on can be proven, and a changed row is named."""

from pathlib import Path

import pytest
from jobs import CONFIG
from typer.testing import CliRunner

import rlake
from rlake.loop import config, run
from rlake.loop.cli import app
from rlake.store.errors import NotFoundError
from rlake.store.verify import verify


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.yaml").write_text(CONFIG)
    run.run(rlake.connect(folder / "lake"), config.load(folder / "small.yaml", ["trainer.steps=2"]))
    return folder / "lake"


def test_every_step_of_a_run_is_what_it_was_trained_on(trained: Path):
    store = rlake.connect(trained)
    verdicts = [verify(store, "small", step) for step in (1, 2)]
    assert all(v.holds for v in verdicts)
    assert [v.num_rows for v in verdicts] == [16, 16]
    assert verdicts[0].digest != verdicts[1].digest
    assert verify(store.at(store.versions()), "small", 1).digest == verdicts[0].digest


def test_a_step_that_was_never_taken_is_an_error(trained: Path):
    with pytest.raises(NotFoundError, match="run `small` has no step 9"):
        verify(rlake.connect(trained), "small", 9)


def test_a_row_changed_behind_our_back_is_found_and_named(trained: Path):
    store = rlake.connect(trained)
    name = "small/000002/0001/03"
    store.dataset("experiences").update({"reward": "reward + 0.001"}, f"experience_id = '{name}'")
    store = rlake.connect(trained)
    assert verify(store, "small", 1).holds
    assert verify(store, "small", 2).changed == [name]

    args = ["verify", "--store", str(trained), "--run", "small", "--step", "2"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 1
    assert f"NOT what was trained on: `{name}` changed" in done.output
