"""The pictures of docs/studio.md, made from a run.

`RLAKE_PICTURES=docs/studio .venv/bin/pytest -m long tests/loop/studio/test_pictures.py` makes those
of the docs anew.
"""

import os
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from support.browser import browser
from support.shown import Shown
from support.studio import studio

import rlake
from rlake.loop.config import RunConfig

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
DOCS = Path(__file__).parents[3] / "docs"
CHARTS = "document.querySelectorAll('.chart canvas').length === 6"


def test_each_picture_of_the_docs_is_made_by_this_test(tmp_path: Path) -> None:
    store = rlake.connect(tmp_path / "lake")
    rlake.run(store, RunConfig.from_yaml("grpo_digits", ["trainer.steps=40"]))
    [(one,)] = store.sql(
        "SELECT min(experience_id) FROM experiences WHERE reward BETWEEN 0.2 AND 0.9"
    ).fetchall()
    shows = {
        "run": ("/run?id=grpo_digits", CHARTS),
        "rollouts": (f"/rollouts?where={quote('reward < 1')}&sort=reward", "true"),
        "rollout": (f"/rollout?id={quote(one)}", "document.querySelector('.tokens span')"),
        "lineage": ("/lineage?run=grpo_digits&version=3", "document.querySelector('svg')"),
    }
    folder = Path(os.environ.get("RLAKE_PICTURES", tmp_path))
    named = set(re.findall(r"studio/(\w+)\.webp", (DOCS / "studio.md").read_text()))
    assert named == shows.keys()
    with studio(store.uri) as url, browser(tmp_path / "profile") as page:
        shown = Shown(store, url, page)
        for name, (address, ready) in shows.items():
            shown.go(address)
            page.wait(ready)
            # charts are animated for a second
            page.value("new Promise(done => setTimeout(done, 2000))")
            assert shown.mistakes() == [], address
            page.value(
                "document.querySelector('.store').innerText = './lake'"
            )  # not this machine's
            page.picture(folder / f"{name}.webp")
