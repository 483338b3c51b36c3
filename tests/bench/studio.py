"""The studio: pages on a large store, and what browsers that watch a run cost it."""

import subprocess
import sys
from collections.abc import Iterator
from time import monotonic

import httpx
from support.browser import browser
from support.shown import SETTLED
from support.studio import cpu_seconds, studio, watching

from rlake.store import connect

from .figure import Bench, Figure, of, timed

_BROWSERS, _STEPS = 20, 120
_RUN = "id=grpo_arithmetic"
_METRICS = "metrics=train/reward_mean,explore/reward_mean,train/kl,train/entropy,train/lag_max"
_PAGES = ("/rollouts", "/runs", "/tasks", "/sql?q=SELECT+count(*)+FROM+experiences")
_FIRST = "document.querySelector('main .title') !== null"


def _here(path: str) -> str:
    """Return the condition that a page is open, and not the one before it."""
    return f"location.pathname === '{path.partition('?')[0]}'"


def studio_pages(bench: Bench) -> Iterator[Figure]:
    """Measure pages of the grid, and the first content of pages, on the large store."""
    store = bench.large
    what = f"{store.count('experiences')} experiences"
    with studio(store.uri) as url, httpx.Client(base_url=url, timeout=100) as client:
        for sort, column in (("", ""), ("reward", "c1"), ("num_tokens", "c3")):

            def page(i: int, column: str = column) -> None:
                start = 100 * (i * 37 % 1900)
                where = f"num_tokens > {i}"  # another one each time: results are kept
                asked = {"sort": column, "order": "desc", "where": where}
                found = client.get(
                    "/rollouts/rows", params=asked | {"start": start, "end": start + 100}
                ).json()
                assert len(found["rows"]) == 100, found

            name = f"studio_grid_page_{sort or 'newest'}"
            yield of(timed(page, times=20), name, 300.0, f"100 rows by {sort or 'time'}, {what}")
        with browser(bench.folder / "profile") as shown:

            def visit(i: int) -> None:
                path = _PAGES[i % len(_PAGES)]
                shown.ask("Page.navigate", url=url + path)
                shown.wait(f"{_here(path)} && {_FIRST}")

            yield of(timed(visit, times=12), "studio_first_content", 1500.0, f"a page, {what}")

            def whole(i: int) -> None:
                path = _PAGES[i % len(_PAGES)]
                shown.ask("Page.navigate", url=url + path)
                shown.wait(f"{_here(path)} && {_FIRST} && {SETTLED}")

            yield of(timed(whole, times=12), "studio_whole_page", None, f"a page, {what}")


def studio_watchers(bench: Bench) -> Iterator[Figure]:
    """Measure the CPU time of a run, and of the studio while 20 browsers watch it."""
    folder = bench.folder / "watched"
    store = connect(folder)
    words = [sys.executable, "-m", "rlake.loop.cli", "--store", str(folder), "run"]
    words += ["grpo_arithmetic", "--set", f"trainer.steps={_STEPS}"]

    def step() -> int:
        found = "SELECT coalesce(max(step), 0) FROM metrics WHERE job = 'train'"
        return store.sql(found).fetchall()[0][0]

    with (
        studio(folder) as url,
        subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run,
    ):
        store.wait_for(
            lambda: step() >= 5 or None, tables=["metrics"], seconds=200, describe=lambda: "step 5"
        )
        with watching(url, f"/run?{_RUN}", f"/run/live?{_RUN}&{_METRICS}", _BROWSERS):
            first, began, before = (
                step(),
                monotonic(),
                (cpu_seconds(url.process), cpu_seconds(run.pid)),
            )
            store.wait_for(
                lambda: step() >= _STEPS - 10 or None,
                tables=["metrics"],
                seconds=500,
                describe=lambda: "the last steps",
            )
            after, seconds = (cpu_seconds(url.process), cpu_seconds(run.pid)), monotonic() - began
            steps = step() - first
    studio_cpu, run_cpu = (b - a for a, b in zip(before, after, strict=True))
    what = f"{_BROWSERS} browsers watch grpo_arithmetic for {steps} steps in {seconds:.0f} s"
    share = round(100 * studio_cpu / run_cpu, 2)
    yield Figure("studio_watchers_cpu", share, "% of the run's CPU time", 5.0, what)
    core = round(100 * studio_cpu / seconds, 2)
    yield Figure("studio_watchers_core", core, "% of a core", None, what)
