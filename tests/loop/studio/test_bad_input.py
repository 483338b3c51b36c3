"""What people and machines do to a studio that they should not, in a real browser."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from time import monotonic

import httpx
import pytest
from support.browser import Page, browser
from support.builders import experiences
from support.images import png
from support.images import shown as showing
from support.shown import Shown
from support.studio import Address, studio

from rlake.loop.studio.run_status import OLDEST_SECONDS
from rlake.store import Store

pytestmark = pytest.mark.slow
SMALL = "trainer.steps=10000 trainer.batch_size=4 name=mine"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def chromium(opened: Page) -> Iterator[Page]:
    """A browser that leaves each studio before it ends: it would look for it again."""
    yield opened
    opened.go("about:blank")


def runs_of(server: int) -> list[int]:
    """Return the processes of runs that a studio started."""
    found = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(server)], capture_output=True, text=True
    )
    return [int(one.split()[0]) for one in found.stdout.splitlines() if " run " in one]


@contextmanager
def writing(store: Store) -> Iterator[Address]:
    """Serve a store with `--write`; what was started there is killed at the end."""
    with studio(store.uri, "--write") as url:
        try:
            yield url
        finally:
            for one in runs_of(url.process):
                os.kill(one, signal.SIGKILL)


def until_a_step(store: Store) -> None:
    """Wait until a run has trained a step."""
    looking = {"tables": ["metrics"], "seconds": 200, "describe": lambda: "a step"}
    store.wait_for(lambda: store.count("metrics") or None, **looking)  # pyright: ignore[reportArgumentType]


def start(shown: Shown) -> None:
    """Start the run of `SMALL` on the page Runs."""
    shown.go("/runs")
    shown.page.wait("window.did_handshake")  # what is typed before may be sent late
    for place, words in enumerate(["grpo_digits", SMALL]):
        shown.page.value(f"document.querySelectorAll('.bar .q-field input')[{place}].focus()")
        shown.page.press(words)
        shown.page.wait(
            f"document.querySelectorAll('.bar .q-field input')[{place}].value === '{words}'"
        )
    shown.page.value(
        "[...document.querySelectorAll('button')].find(b => b.innerText == 'Start').click()"
    )


def test_a_run_that_is_killed_while_it_is_watched_is_dead(chromium: Page, store: Store) -> None:
    words = [sys.executable, "-m", "rlake.loop.cli", "--store", store.uri, "run", "grpo_digits"]
    words += [word for change in SMALL.split() for word in ("--set", change)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as run, studio(store.uri) as url:
        try:
            until_a_step(store)
            shown = Shown(store, url, chromium)
            shown.go("/run?id=mine")
            status = "document.querySelector('main .status').innerText"
            chromium.wait(f"{status} === 'running'")
        finally:
            run.kill()
        killed = monotonic()
        chromium.wait(f"{status} === 'dead'")
        # locks are looked at every 3 s, and the rest is a margin for a machine that is busy
        assert monotonic() - killed < OLDEST_SECONDS
        assert "A process of this run is gone" in shown.text()
        assert shown.mistakes() == []
        shown.go("/runs")
        chromium.wait("document.querySelector('.ag-row .status')?.innerText === 'dead'")


def test_the_second_who_starts_a_run_is_told(chromium: Page, store: Store) -> None:
    said = "[...document.querySelectorAll('.q-notification')].map(e => e.innerText).join()"
    with writing(store) as one, writing(store) as other:
        start(Shown(store, one, chromium))
        chromium.wait("location.pathname === '/run' && location.search === '?id=mine'")
        start(Shown(store, one, chromium))
        chromium.wait(f"{said}.includes('run `mine` is running already')")
        until_a_step(store)
        start(Shown(store, other, chromium))
        chromium.wait(f"{said}.includes('run `mine` was started before')")
        assert (len(runs_of(one.process)), runs_of(other.process)) == (1, [])


FORGED = """(() => {
  const button = [...document.querySelectorAll('button')].find(b => b.innerText === 'Start');
  getElement(+button.id.slice(1)).$emit('click', {});
})()"""
"""What a click on Start sends, whether or not the page offers it."""


def test_a_forged_start_starts_nothing_where_the_studio_only_reads(
    chromium: Page, store: Store
) -> None:
    def forge(url: Address, seconds: float) -> float | None:
        """Return after how long a run was started, or None."""
        Shown(store, url, chromium).go("/new?recipe=grpo_digits")
        chromium.wait("document.querySelector('main').innerText.includes('Valid')")
        began = monotonic()
        while monotonic() - began < seconds:
            chromium.value(FORGED)  # often: the button is disabled while what is typed is checked
            if runs_of(url.process):
                return monotonic() - began
            Event().wait(0.2)
        return None

    with writing(store) as url:
        took = forge(url, 60)
        assert took is not None, "the forged click is not what a click sends"
    with studio(store.uri) as url:
        assert forge(url, 2 * took + 1) is None


def test_bytes_that_are_no_image_are_neither_shown_nor_run(chromium: Page, store: Store) -> None:
    script = b"<html><script>window.hacked = 1</script></html>"
    cut = png("red")[:40]
    stored = {"script": ("image/png", script), "html": ("text/html", script)}
    stored |= {"cut": ("image/png", cut), "red": ("image/png", png("red"))}
    rows = [
        {"media_id": name, "mime": mime, "data": data, "num_bytes": len(data)}
        for name, (mime, data) in stored.items()
    ]
    store.append("media", [row | {"width": 8, "height": 6} for row in rows])
    messages = [one for name in stored for one in showing(name, "which color?")]
    store.append("experiences", experiences(1, messages=messages))
    with studio(store.uri) as url:
        shown = Shown(store, url, chromium)
        shown.go("/rollout?id=g000/00")
        chromium.wait("[...document.querySelectorAll('main img')].every(one => one.complete)")
        drawn = "[...document.querySelectorAll('main img')].map(one => [one.alt, one.naturalWidth])"
        widths = {f"image {name}": 8 * (name == "red") for name in stored}
        assert dict(chromium.value(drawn)) == widths
        assert shown.mistakes() == []
        for name, (_, data) in stored.items():
            answer = httpx.get(f"{url}/rollout/image?id={name}")
            assert (answer.content, answer.headers["x-content-type-options"]) == (data, "nosniff")
            assert "html" not in answer.headers["content-type"]
            chromium.go(f"{url}/rollout/image?id={name}")
            assert chromium.value("window.hacked") is None
