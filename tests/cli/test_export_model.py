"""A run's weights in a folder of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import offline, tiny, written
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlake
from rlake.loop.cli import run_command as rlake_command
from rlake.loop.models.load import load_folder, tokenizer_digest
from rlake.loop.run import run
from rlake.loop.weight_sync import newest
from rlake.store import Store


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with two runs, one of whole models, one of adapters whose files lie elsewhere."""
    folder = tmp_path_factory.mktemp("export")
    store = rlake.connect(folder / "store")
    store.append("experiences", written(8))
    trainer = {"steps": 1, "batch_size": 4}
    run(store, offline(name="whole", trainer=trainer))
    elsewhere = str(folder / "elsewhere")
    run(store, offline(name="small", output=elsewhere, model={"lora": {}}, trainer=trainer))
    return store


def export(store: Store, *args: str) -> int:
    return rlake_command(["export", "model", *args, "--store", store.uri])


def assert_complete(folder: Path) -> None:
    """A loader that knows nothing of us finds the class, the dtype, all keys and the tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["Qwen3ForCausalLM"], "float32")
    assert (folder / "generation_config.json").is_file()
    kind: Any = AutoModelForCausalLM
    model, found = kind.from_pretrained(str(folder), dtype="auto", output_loading_info=True)
    assert (type(model).__name__, model.dtype) == ("Qwen3ForCausalLM", torch.float32)
    wrong = ("missing_keys", "unexpected_keys", "mismatched_keys")
    assert not any(found[name] for name in wrong), found
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    assert tokenizer_digest(tokenizer) == tokenizer_digest(tiny()[1])


@pytest.mark.parametrize("run_id", ["whole", "small"])
def test_published_and_exported_folders_are_complete_for_other_loaders(
    trained: Store, tmp_path: Path, run_id: str
) -> None:
    elsewhere = Path(trained.uri).parent / "elsewhere" / "small"
    assert trained.runs_folder is not None
    runs = {"whole": trained.runs_folder / "whole", "small": elsewhere}
    out = tmp_path / "out"
    assert export(trained, run_id, "--folder", str(runs[run_id]), "--out", str(out)) == 0
    assert_complete(out)
    published = newest(trained, runs[run_id], run_id).folder
    # an adapter is published beside the model that it goes on top of
    assert_complete(published if run_id == "whole" else elsewhere / "base")


def test_whole_weights_are_a_folder_that_transformers_loads(
    trained: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    assert export(trained, "whole", "--out", str(out)) == 0
    assert capsys.readouterr().out == f"wrote version 1 of whole to {out}: a whole model\n"
    model = AutoModelForCausalLM.from_pretrained(str(out))
    assert trained.runs_folder is not None
    ours, _ = load_folder(newest(trained, trained.runs_folder / "whole", "whole").folder)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def test_a_run_that_lies_elsewhere_is_found_where_it_is_said_to_be(
    trained: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert export(trained, "small", "--out", out) == 2
    assert "name its folder there with `--folder`" in capsys.readouterr().err
    place = Path(trained.uri).parent / "elsewhere" / "small"
    assert export(trained, "small", "--folder", str(place), "--out", out) == 0
    told = capsys.readouterr().out
    assert told == f"wrote version 1 of small to {out}: its adapter merged into the model\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["whle"], "run `whle` has published no weights; did you mean `whole`?"),
        (["whole", "--version", "7"], "run `whole` has no weights of version 7; there are [0, 1]"),
        (["whole", "--where", "true"], "--where is for rows, not for `model`"),
        ([], "the run is missing; name it"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    trained: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    out = tmp_path / "out"
    assert export(trained, *args, "--out", str(out)) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_for_weights_only(
    trained: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["export", "sft", "whole", "--out", str(tmp_path / "x.jsonl"), "--store", trained.uri]
    assert rlake_command(args) == 2
    assert "RUN is for `model`, not for `sft`" in capsys.readouterr().err


def test_the_answer_may_be_an_object(
    trained: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert export(trained, "whole", "--version", "0", "--out", str(out), "--json") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == {"what": "model", "run": "whole", "version": 0, "kind": "model", "out": str(out)}


def test_damaged_weights_are_not_exported(
    trained: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained.runs_folder is not None
    weights = newest(trained, trained.runs_folder / "whole", "whole").file
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + b"x")
    try:
        assert export(trained, "whole", "--out", str(tmp_path / "out")) == 1
    finally:
        weights.write_bytes(content)
    assert "is not what was published" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
