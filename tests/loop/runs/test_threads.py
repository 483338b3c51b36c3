"""Explorer and trainer of a tiny model compute with one thread each, unless told otherwise."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import CONFIG

from rlake.loop.config import build, load
from rlake.loop.models.threads import threads_restored, use_threads
from rlake.loop.run import run
from rlake.store import connect

TORCH = 3
LARGER = {"model": {"from_scratch": {"hidden_size": 256, "layers": 4}}}


@pytest.fixture(autouse=True)
def _torch() -> Iterator[None]:
    with threads_restored():
        torch.set_num_threads(TORCH)
        yield


def _used(config: dict[str, Any], **changes: Any) -> int:
    use_threads(build({**config, **changes}))
    return torch.get_num_threads()


def _config(folder: Path) -> dict[str, Any]:
    (folder / "small.yaml").write_text(CONFIG)
    return load(folder / "small.yaml").model_dump(exclude_unset=True) | {"threads": None}


def test_a_run_of_a_tiny_model_uses_one_thread_and_gives_the_others_back(tmp_path: Path) -> None:
    seen: set[tuple[str, int]] = set()
    config = build({**_config(tmp_path), "evaluate": None})
    store = connect(tmp_path / "lake")
    run(store, config, listener=lambda job, *_: seen.add((job, torch.get_num_threads())))
    assert seen == {("explore", 1), ("train", 1)}
    assert torch.get_num_threads() == TORCH


def test_a_number_of_threads_is_used_as_given(tmp_path: Path) -> None:
    assert _used(_config(tmp_path), threads=2) == 2


def test_a_model_that_several_threads_serve_keeps_those_of_torch(tmp_path: Path) -> None:
    assert _used(_config(tmp_path), **LARGER) == TORCH


def test_a_trainer_without_an_explorer_keeps_the_threads_of_torch(tmp_path: Path) -> None:
    config = _config(tmp_path)
    offline = {key: config[key] for key in ("name", "model", "trainer", "threads")}
    assert _used(offline, algorithm="sft", trainer={"steps": 2}) == TORCH


def test_a_model_of_which_only_an_adapter_is_found_keeps_the_threads_of_torch(
    tmp_path: Path,
) -> None:
    config = _config(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"0" * 100)
    assert _used(config, model={"path": str(tmp_path)}) == TORCH
    (tmp_path / "model.safetensors").write_bytes(b"0" * 100)
    assert _used(config, model={"path": str(tmp_path)}) == 1
