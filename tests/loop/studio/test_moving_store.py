"""The studio over a store that moves: a run that goes on, and restores, seen in a real browser."""

import subprocess
import sys
from pathlib import Path
from shutil import copytree
from statistics import median
from threading import Event, Thread

import pytest
from support.browser import browser
from support.builders import experiences, task
from support.shown import ERRORS, SETTLED, Shown
from support.studio import studio

import rlake
from rlake.store import Store

RUN = "grpo_digits"
SECONDS = 2.0
WATCH = """(() => {
  window.seen = {};
  const look = first => {
    const one = document.querySelector('.chart .nicegui-echart');
    const chart = getElement(+one.id.slice(1))?.chart;
    for (const [step] of chart?.getOption().series[0]?.data ?? [])
      window.seen[step] ??= first ? 0 : Date.now();
  };
  look(true);
  setInterval(look, 20);
})()"""
"""Notes when each step of the first curve came; zero: it was there before."""


def step(store: Store) -> int:
    found = "SELECT coalesce(max(step), 0) FROM metrics WHERE name = 'train/reward_mean'"
    return store.sql(found).fetchall()[0][0]


def until(store: Store, least: int) -> None:
    store.wait_for(
        lambda: step(store) >= least or None,
        tables=["metrics"],
        seconds=200,
        describe=lambda: f"step {least}",
    )


@pytest.mark.long
def test_a_live_run_moves_its_curve_within_two_seconds_of_a_step(tmp_path: Path) -> None:
    store = rlake.connect(tmp_path / "lake")
    words = [sys.executable, "-m", "rlake.loop.cli", "--store", store.uri, "run", RUN]
    words += ["--set", "trainer.steps=60", "--set", "trainer.batch_size=4"]
    with studio(store.uri) as url, browser(tmp_path / "profile") as page:
        shown = Shown(store, url, page)
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            until(store, 2)
            shown.go(f"/run?id={RUN}")
            page.wait("document.querySelectorAll('.chart canvas').length === 6")
            page.value(WATCH)
            assert run.wait(200) == 0
        page.wait("window.seen[60]")
        assert shown.mistakes() == []
        seen = {int(at): ms / 1000 for at, ms in page.value("window.seen").items() if ms}
    stored = store.sql(
        "SELECT step, epoch(created_at) FROM metrics WHERE name = 'train/reward_mean'"
    ).fetchall()
    delays = [seen[at] - when for at, when in stored if at in seen]
    assert len(delays) >= 10
    # of most: this machine may do other work too
    assert median(delays) < SECONDS, sorted(delays)


@pytest.mark.slow
def test_pages_open_while_a_store_is_restored_and_show_it_afterwards(
    finished_run: Path, tmp_path: Path
) -> None:
    copytree(finished_run, tmp_path / "lake")
    store = rlake.connect(tmp_path / "lake")
    store.snapshot("before")
    store.append("tasks", [task(i) for i in range(3)])
    store.append("experiences", experiences(12, reward=1.0, run_id=RUN))
    store.snapshot("after")
    ended, failed = Event(), []

    def restore() -> None:
        try:
            for i in range(1000):
                if ended.is_set():
                    return
                store.restore("after" if i % 2 else "before")
        except Exception as error:  # noqa: BLE001  shown below: a thread cannot fail the test
            failed.append(error)

    with studio(store.uri) as url, browser(tmp_path / "profile") as page:
        shown = Shown(rlake.connect(store.uri), url, page)
        restoring = Thread(target=restore)
        restoring.start()
        try:
            for address in [*shown.addresses(RUN)] * 2:
                shown.go(address)
                # a table may be of before and another of after; none of it is a fault of the page
                assert "failed with" not in page.value(ERRORS), address
                assert shown.mistakes() == [], address
        finally:
            ended.set()
            restoring.join(60)
        assert failed == []
        store.restore("after")
        rows = store.count("experiences")
        page.ask("Page.navigate", url=f"{url}/rollouts")
        page.wait(f"{SETTLED} && document.querySelector('main').innerText.includes('{rows} roll')")
        assert page.value(ERRORS) == ""
