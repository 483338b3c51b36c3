"""On GPUs, over NCCL: what one learns, two learn."""

from pathlib import Path

import pytest
import torch
from support.distributed import place, settings
from support.jobs import told

from rlake.loop.run import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_two_gpus_learn_what_one_learns(tmp_path: Path) -> None:
    one, two = place(tmp_path / "one"), place(tmp_path / "two")
    train(one, settings())
    train(two, settings(world_size=2))
    assert told(two)["drawn"] == told(one)["drawn"]
    for ours, theirs in zip(told(one)["losses"], told(two)["losses"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2)  # a GPU trains in bfloat16
