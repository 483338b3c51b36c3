"""Every page on the stores that people have: the quickstart's, and one of 200,000 rollouts."""

import subprocess
import sys
from pathlib import Path
from statistics import median
from time import monotonic

import httpx
import pytest
from bench.figure import Bench
from support.browser import browser
from support.shown import Shown
from support.studio import studio

import rlake
from rlake.loop.config import RunConfig

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
FIRST_SECONDS, GRID_SECONDS = 1.5, 0.3


def test_every_page_opens_in_time_on_200_000_rollouts(tmp_path: Path) -> None:
    store = Bench(tmp_path, rows=200_000).large
    config = RunConfig.from_yaml("grpo_digits", ["trainer.steps=3", "trainer.batch_size=4"])
    rlake.run(store, config)
    assert store.count("experiences") > 200_000
    with studio(store.uri) as url, browser(tmp_path / "profile") as page:
        shown = Shown(store, url, page)
        once, again = (shown.open_every_page("grpo_digits") for _ in range(2))
        # the better of both, for this machine may do other work too
        slow = {one: s for one in once if (s := min(once[one], again[one])) >= FIRST_SECONDS}
        assert slow == {}
        assert median(grid_page(url, i) for i in range(15)) < GRID_SECONDS


def grid_page(url: str, place: int) -> float:
    """Return how long a page of the grid takes, of a condition that was not asked before."""
    asked = {"sort": ("", "c1", "c3")[place % 3], "order": "desc", "where": f"num_tokens > {place}"}
    asked |= {"start": str(3700 * place), "end": str(3700 * place + 100)}
    began = monotonic()
    found = httpx.get(f"{url}/rollouts/rows", params=asked, timeout=100).json()
    assert len(found["rows"]) == 100
    return monotonic() - began


def test_every_page_opens_on_the_store_of_the_quickstart(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlake.loop.cli", "quickstart", str(tmp_path / "new")]
    subprocess.run(command, check=True, capture_output=True)
    store = rlake.connect(tmp_path / "new" / "lake", create=False)
    with studio(store.uri) as url, browser(tmp_path / "profile") as page:
        Shown(store, url, page).open_every_page("quickstart_grpo")
