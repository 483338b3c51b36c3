"""The studio on a store of 200,000 rollouts."""

from pathlib import Path

import pytest
from bench.figure import Bench
from support.browser import browser
from support.shown import Shown
from support.studio import studio

import rlake
from rlake.loop.config import RunConfig

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_every_page_opens_on_200_000_rollouts(tmp_path: Path) -> None:
    store = Bench(tmp_path, rows=200_000).large
    config = RunConfig.from_yaml("grpo_digits", ["trainer.steps=3", "trainer.batch_size=4"])
    rlake.run(store, config)
    assert store.count("experiences") > 200_000
    with studio(store.uri) as url, browser(tmp_path / "profile") as page:
        Shown(store, url, page).open_every_page("grpo_digits")
