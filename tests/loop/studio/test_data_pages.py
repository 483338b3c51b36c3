"""The pages about a run's history and the store's data, in a real browser."""

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from urllib.parse import quote

import pytest
from support.browser import browser
from support.shown import ERRORS, Shown
from support.studio import HOSTILE, hostile_rollouts, studio

import rlake
from rlake.loop.audits import bias, drop
from rlake.pipelines.expectations import Expectation, check

pytestmark = pytest.mark.slow
RUN = "grpo_digits"


@pytest.fixture(scope="module")
def shown(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """Show a copy of the run's store, with what the pages are about; they may write."""
    folder = tmp_path_factory.mktemp("data")
    copytree(finished_run, folder / "lake")
    store = rlake.connect(folder / "lake")
    passing = Expectation(range={"reward": (2, None)}, name=f"much {HOSTILE}")
    check(store, [passing], HOSTILE, select="SELECT * FROM experiences", run_id=RUN)
    hostile_rollouts(store)
    job = {"run_id": HOSTILE, "name": HOSTILE, "attempt": 1, "job": "train", "status": "done"}
    store.append("job_events", [job | {"config": "{}", "code_version": "0", "start_step": 1}])
    with studio(folder / "lake", "--write") as url, browser(folder / "profile") as page:
        yield Shown(store, url, page)


def opened(shown: Shown, address: str, *texts: str) -> None:
    """Open a page and see the texts on it, no error, and nothing that ran as a script."""
    shown.go(address)
    for one in texts:
        shown.page.wait(f"document.querySelector('main').innerText.includes({json.dumps(one)})")
    assert shown.mistakes() == []
    assert shown.page.value("window.hacked") is None
    assert shown.page.value("document.querySelectorAll('main img').length") == 0


def test_audits_are_sentences(shown: Shown) -> None:
    found = bias(shown.store, RUN)
    opened(shown, f"/audits?run={RUN}", *found.facts, f"much {HOSTILE}", "within chance")
    assert shown.page.value(ERRORS) == ""
    first, second = drop(shown.store, RUN, (2, 3), (1, 1)).reward_mean
    rule = quote("finish_reason = 'stop'")
    address = f"/audits?run={RUN}&steps=2:3&against=1&weight={rule}"
    opened(shown, address, f"Mean reward {first:.4f} → {second:.4f}", "left out: 0 rows")


def test_an_audit_that_cannot_answer_says_why_and_the_others_answer(shown: Shown) -> None:
    address = f"/audits?run={RUN}&steps=9:1&against=1&weight={quote('rewrd > 0')}"
    opened(shown, address, "must be two steps", "names a column `rewrd`", "differ from")
    opened(shown, f"/audits?run={quote(HOSTILE)}", "has trained no step")
