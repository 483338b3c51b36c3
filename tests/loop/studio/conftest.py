"""The store of a finished run, made once."""

from pathlib import Path

import pytest

import rlake
from rlake.loop.config import RunConfig


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the store of a short run of `grpo_digits`: copy it to write into it."""
    place = tmp_path_factory.mktemp("finished") / "lake"
    config = RunConfig.from_yaml("grpo_digits", ["trainer.steps=3", "trainer.batch_size=4"])
    rlake.run(rlake.connect(place), config)
    return place
