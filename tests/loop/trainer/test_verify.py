"""What a step was trained on can be proven, and a changed row is named."""

import shutil
import struct
from pathlib import Path

import pytest
from support.jobs import CONFIG
from typer.testing import CliRunner

import rlake
from rlake.loop import config, run
from rlake.loop.cli.program import app_of
from rlake.loop.trainer.redraw import rebuild
from rlake.store.errors import NotFoundError
from rlake.store.verify_draws import verify


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


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """A copy of that store, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "lake"))


def test_a_row_changed_behind_our_back_is_found_and_named(copy: Path):
    store = rlake.connect(copy)
    name = "small/000002/0001/03"
    store.dataset("experiences").update({"reward": "reward + 0.001"}, f"experience_id = '{name}'")
    store = rlake.connect(copy)
    assert verify(store, "small", 1).holds
    assert verify(store, "small", 2).changed == [name]

    args = ["verify", "--store", str(copy), "--run", "small", "--step", "2"]
    done = CliRunner().invoke(app_of(), args)
    assert done.exit_code == 1
    assert f"NOT what was trained on: `{name}` changed" in done.output


def test_one_flipped_byte_in_a_payload_is_found_and_named(copy: Path) -> None:
    store = rlake.connect(copy)
    query = "SELECT experience_id, logprobs FROM experiences WHERE experience_id LIKE '%/000002/%'"
    [[name, logprobs], *_] = store.sql(query).fetchall()
    sampled = struct.pack("<f", next(value for value in logprobs if value))
    flip(copy / "experiences.lance" / "data", sampled)
    step = 2 if "/000002/" in name else 1
    verdict = verify(rlake.connect(copy), "small", step)
    assert not verdict.holds
    assert name in verdict.changed + verdict.unreadable
    assert f"`{name}`" in str(verdict)


def flip(folder: Path, pattern: bytes) -> None:
    """Flip one bit of the first place in a folder's files that holds these bytes."""
    for path in folder.iterdir():
        content = bytearray(path.read_bytes())
        at = content.find(pattern)
        if at >= 0:
            content[at] ^= 1
            path.write_bytes(content)
            return
    raise AssertionError("no file holds the bytes")


def test_a_step_whose_file_is_gone_is_told_row_by_row(copy: Path) -> None:
    for path in (copy / "experiences.lance" / "data").iterdir():
        path.unlink()
    done = CliRunner().invoke(app_of(), ["verify", "--store", str(copy), "--run", "small"])
    assert done.exit_code == 1
    assert "`small/000002/0000/00` unreadable" in done.output
    assert "NOT drawn again: cannot read" in done.output
    assert done.output.splitlines()[-1] == "2 steps of `small`: 2 differ"


def test_a_step_in_another_order_is_not_the_step(copy: Path) -> None:
    store = rlake.connect(copy)
    store.dataset("draws").update({"position": "15 - position"}, "step = 2")
    verdict = verify(rlake.connect(copy), "small", 2)
    assert (verdict.holds, verdict.changed) == (False, [])
    assert "its digest was" in str(verdict)


def test_every_batch_is_drawn_again_the_same(trained: Path) -> None:
    store = rlake.connect(trained)
    for step in (1, 2):
        again = rebuild(store, "small", step)
        assert again.is_same, str(again)


def test_a_batch_that_was_tampered_with_is_not_drawn_again(copy: Path) -> None:
    store = rlake.connect(copy)
    rows = store.dataset("draws")
    rows.update({"experience_id": "'small/000002/0001/03'"}, "step = 2 AND position = 0")
    again = rebuild(rlake.connect(copy), "small", 2)
    assert not again.is_same
    assert "NOT" in str(again)


def test_the_command_verifies_one_step_or_all(trained: Path) -> None:
    args = ["verify", "--store", str(trained), "--run", "small"]
    done = CliRunner().invoke(app_of(), [*args, "--step", "2"])
    assert "step 2 of `small`: drawn again: the same rows and weights" in done.output
    done = CliRunner().invoke(app_of(), args)
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "2 steps of `small`: none differ")
