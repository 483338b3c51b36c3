"""The pages in a real browser, over the store of a finished run."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from time import monotonic
from urllib.parse import quote

import httpx
import pytest
from support.browser import browser
from support.shown import SETTLED, Shown
from support.studio import HOSTILE, HOUR, hostile_rollouts, studio
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as websocket

import rlake

pytestmark = pytest.mark.slow
RUN = "grpo_digits"
ROWS = "document.querySelectorAll('.ag-center-cols-container .ag-row').length"


@pytest.fixture(scope="module")
def shown(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp("studio")
    copytree(finished_run, folder / "lake")
    store = rlake.connect(folder / "lake")
    with studio(folder / "lake") as url, browser(folder / "profile") as page:
        yield Shown(store, url, page)


def test_every_page_opens_without_an_error(shown: Shown) -> None:
    shown.open_every_page(RUN)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("/run?id=nobody", "no run `nobody`"),
        ("/rollout?id=nothing", "no rollout `nothing`"),
        ("/rollouts?where=rewrd", "names a column `rewrd`"),
        ("/sql?q=DROP TABLE tasks", "read with one SELECT"),
    ],
)
def test_a_wrong_address_says_what_is_wrong(shown: Shown, address: str, told: str) -> None:
    shown.go(address)
    shown.page.wait(f"document.querySelector('main .error').innerText.includes('{told}')")


def test_a_step_leads_to_its_rows_and_a_row_to_the_rollout(shown: Shown) -> None:
    page = shown.page
    shown.go(f"/run?id={RUN}")
    page.wait("document.querySelectorAll('.chart canvas').length === 6")
    # the last point of the first curve, where a person would click
    x, y = page.value(
        """(() => { const one = document.querySelector('.chart .nicegui-echart');
        const chart = getElement(+one.id.slice(1)).chart, box = one.getBoundingClientRect();
        const data = chart.getOption().series[0].data, last = data[data.length - 1];
        const at = chart.convertToPixel({seriesIndex: 0}, last);
        return [box.x + at[0], box.y + at[1]]; })()"""
    )
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        page.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    page.wait(f"location.pathname === '/rollouts' && {SETTLED} && {ROWS} > 1")
    assert "step = 3" in page.value("decodeURIComponent(location.search).replaceAll('+', ' ')")
    page.value("document.querySelector('.ag-center-cols-container .ag-row .ag-cell').click()")
    page.wait(f"location.pathname === '/rollout' && {SETTLED}")
    page.wait("document.querySelectorAll('.tokens span').length > 0")
    assert "Trained in" in shown.text()


def test_a_curve_comes_with_its_first_point_and_leaves_with_a_restore(shown: Shown) -> None:
    shown.store.snapshot("before")
    shown.go(f"/run?id={RUN}")
    curves = """[...document.querySelectorAll('.chart .nicegui-echart')].flatMap(one =>
        (getElement(+one.id.slice(1))?.chart?.getOption()?.series ?? [])
        .map(({name, data}) => [name, data.at(-1)[0]].join(' '))).join(', ')"""
    shown.page.wait("document.querySelectorAll('.chart canvas').length === 6")
    before = shown.page.value(curves)
    row = {"run_id": RUN, "attempt": 1, "job": "train", "name": "eval/reward_mean", "value": 0.5}
    shown.store.append("metrics", [row | {"step": 9}, row | {"step": 9, "name": "train/kl"}])
    shown.page.wait(f"{curves}.includes('eval/reward_mean 9') && {curves}.includes('train/kl 9')")
    shown.store.restore("before")
    shown.page.wait(f"{curves} === {json.dumps(before)}")
    assert shown.page.value("document.querySelectorAll('.chart canvas').length") == 6
    assert shown.mistakes() == []


def test_a_step_that_is_stored_moves_the_curve_of_a_tab_that_is_seen(shown: Shown) -> None:
    shown.go(f"/run?id={RUN}")
    last = """(() => { const one = document.querySelector('.chart .nicegui-echart');
        const data = getElement(+one.id.slice(1)).chart.getOption().series[0].data;
        return data[data.length - 1]; })()"""
    shown.page.wait("document.querySelectorAll('.chart canvas').length === 6")
    assert shown.page.value(last)[0] == 3
    row = {"run_id": RUN, "attempt": 1, "job": "train", "step": 4, "name": "train/reward_mean"}
    shown.store.append("metrics", [row | {"value": 0.875}])
    shown.page.wait(f"{last}[0] === 4")
    assert shown.page.value(last)[1] == 0.875
    shown.page.wait("document.querySelector('main dl').innerText.includes('4 of 3')")
    assert shown.mistakes() == []
    shown.page.events.clear()
    hidden = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    hidden += "document.dispatchEvent(new Event('visibilitychange'))"
    shown.page.value(hidden % "true")
    for _ in range(200):  # as long as `wait`: closing takes milliseconds
        shown.page.value("new Promise(done => setTimeout(done, 50))")
        if any(one["method"] == "Network.webSocketClosed" for one in shown.page.events):
            break
    else:
        pytest.fail("a hidden tab still watches")
    shown.store.append("metrics", [row | {"step": 5, "value": 0.25}])
    shown.page.value(hidden % "false")
    shown.page.wait(f"{last}[0] === 5")
    assert shown.mistakes() == []


def test_a_studio_that_only_reads_offers_nothing_that_writes_or_runs_code(shown: Shown) -> None:
    enabled = "[...document.querySelectorAll('main button:not([disabled])')].map(e => e.innerText)"
    shown.store.snapshot("one")
    writing = {"Start", "Stop", "Resume", "Restore", "Take a snapshot", "Preview"}
    for address in (f"/run?id={RUN}", "/runs", "/snapshots?first=one", "/pipelines"):
        shown.go(address)
        assert not writing & set(shown.page.value(enabled)), address


def test_the_address_keeps_how_rows_are_sorted(shown: Shown) -> None:
    shown.go("/rollouts")
    shown.page.wait(f"{ROWS} > 3")
    shown.page.value(
        "document.querySelector('.ag-header-cell[col-id=c1] .ag-header-cell-label').click()"
    )
    shown.page.wait("location.search.includes('sort=reward&order=asc')")
    assert shown.mistakes() == []


def test_versions_are_listed_from_the_newest(shown: Shown) -> None:
    shown.go("/rollouts")
    listed = """[...document.querySelectorAll('.facet')].filter(one => one.previousElementSibling
        .innerText.toLowerCase() === 'policy version')[0].innerText.trim().split(/\\s+/)"""
    newest = shown.store.sql(
        "SELECT policy_version, count(*) FROM experiences GROUP BY 1 ORDER BY 1 DESC LIMIT 8"
    ).fetchall()
    assert len(newest) > 1
    assert shown.page.value(listed) == [str(one) for row in newest for one in row]


def test_texts_of_rollouts_never_run(shown: Shown, tmp_path: Path) -> None:
    store = rlake.connect(tmp_path / "lake")
    one = hostile_rollouts(store)
    aliased = "SELECT response_text AS \":response\", {':x': response_text} AS s, experience_id "
    wanted = {
        "/rollouts": "onerror",
        f"/rollout?id={quote(one)}": "onerror",
        f"/rollout?id={quote(one)}&with={quote('x1' + HOSTILE)}": "onerror",
        f"/sql?q={quote(aliased + 'FROM experiences')}": "onerror",
        f"/sql?q={quote('SELECT response_text, 1 AS one FROM experiences')}&as=chart": "2 rows",
        f"/sql?q={quote(f'SELECT {HOSTILE}')}": "onerror",
        f"/rollouts?where={quote(HOSTILE)}": "onerror",
        f"/run?id={quote(HOSTILE)}": "onerror",
    }
    with studio(tmp_path / "lake") as url:
        other = Shown(store, url, shown.page)
        for address, told in wanted.items():
            other.go(address)
            shown.page.wait(f"document.querySelector('main').innerText.includes('{told}')")
            if address.startswith("/rollouts") and "where" not in address:
                shown.page.wait(f"{ROWS} === 2")
            assert shown.page.value("window.hacked") is None, address
            assert shown.page.value("document.querySelectorAll('main img').length") == 0, address
            assert other.mistakes() == [], address


def test_a_page_of_another_origin_neither_reads_nor_starts_anything(shown: Shown) -> None:
    """From a real page of another port: by fetch, by an image, by a frame and by a websocket."""
    ws = shown.url.replace("http", "ws") + "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    with studio(shown.store.uri) as other:
        shown.page.go(f"{other}/sql")
        tried = shown.page.value(
            f"""Promise.all([
            fetch("{shown.url}/rollouts/rows").then(r => r.text(), () => "refused"),
            fetch("{shown.url}/rollouts/rows", {{mode: "no-cors"}}).then(r => r.type, () => "no"),
            new Promise(done => {{ const socket = new WebSocket("{ws}");
                socket.onopen = () => done("open"); socket.onerror = () => done("refused"); }}),
            ])"""
        )
    assert tried[0] == tried[2] == "refused"
    assert tried[1] in ("no", "opaque")
    # the page above has a policy that forbids to try; these come as from a page without one
    there = {"Origin": "http://evil.example"}
    with pytest.raises(InvalidStatus, match="403"), websocket(ws, additional_headers=there):
        pass
    with websocket(ws, additional_headers={"Origin": shown.url}) as socket:
        assert str(socket.recv(timeout=60)).startswith("0{")
    assert httpx.get(f"{shown.url}/rollouts/rows", headers=there).status_code == 403
    site = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    site |= {"Sec-Fetch-Dest": "document"}
    asked = httpx.get(f"{shown.url}/sql?q=SELECT 1", headers=site)
    assert re.search(r'<a href="/sql\?q=SELECT\+1">', asked.text), "it asks before it runs"


def test_a_rollout_of_ten_megabytes_and_an_image_that_is_none(shown: Shown, tmp_path: Path) -> None:
    store = rlake.connect(tmp_path / "lake")
    content = [{"type": "image", "media_id": "gone"}, {"type": "text", "text": "which color?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "a" * 10**7}]
    n = 300_000
    row = {
        "experience_id": "big",
        "task_id": "t",
        "group_id": "g",
        "rollout_index": 0,
        "source": "imported",
        "messages": json.dumps(messages),
        "response_text": "a" * 10**7,
        "token_ids": list(range(n)),
        "loss_mask": [True] * n,
        "logprobs": [-0.5] * n,
        "prompt_length": 0,
        "num_tokens": n,
    }
    store.append("experiences", [row])
    with studio(tmp_path / "lake") as url:
        other = Shown(store, url, shown.page)
        other.go("/rollout?id=big")
        shown.page.wait("document.querySelectorAll('.tokens span').length === 4000")
        assert "more characters" in other.text()
        assert "more tokens" in other.text()
        assert shown.page.value("document.querySelector('main img').alt") == "image gone"
        assert httpx.get(f"{url}/rollout/image?id=gone").status_code == 404
        other.go("/sql?q=SELECT * FROM experiences")
        shown.page.wait(f"{ROWS} === 1")
        assert shown.page.value("document.documentElement.innerHTML.length") < 10**6


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_ends_it_at_once_whatever_a_page_waits_for(
    shown: Shown, number: int, code: int
) -> None:
    with studio(shown.store.uri) as url:
        shown.page.go(f"{url}/sql?q={quote(HOUR)}")
        shown.page.wait("document.querySelector('main .waiting')")
        os.kill(url.process, number)
        # bounded: the watcher of signals gives no grace here, and the query takes hours
        ended, state = waited(url.process, 20)
        assert (ended, os.waitstatus_to_exitcode(state)) == (url.process, code)


def waited(process: int, seconds: float) -> tuple[int, int]:
    """Wait for a process of ours to end; return its number and status, or zeros."""
    end = monotonic() + seconds
    while (found := os.waitpid(process, os.WNOHANG)) == (0, 0) and monotonic() < end:
        threading.Event().wait(0.05)
    return found
