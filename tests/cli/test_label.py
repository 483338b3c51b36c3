"""`rlake label` and `rlake feedback`: in a terminal, in a browser's place, and from files."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import httpx
import pytest
from support.builders import experiences
from support.commands import Command, refused

from rlake.store import Store


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda text: monkeypatch.setattr("sys.stdin", StringIO(text))


def labels(lake: Store) -> list[tuple[str, str, str | None]]:
    return lake.sql("SELECT annotator, label, comment FROM feedback ORDER BY created_at").fetchall()


def test_labels_are_typed_line_by_line(
    rlake: Command, lake: Store, typed: Callable[[str], None]
) -> None:
    lake.append("experiences", experiences(3, reward=1.0))
    typed("x\n1 well said\nb\n2\ns\nq\n")
    done = rlake("label", "--annotator", "ann", "--json")
    assert done.returncode == 0, done.stderr
    assert labels(lake) == [("ann", "good", "well said"), ("ann", "bad", None), ("ann", None, None)]
    assert json.loads(done.stdout) == {
        "queue": "review", "annotator": "ann", "labeled": 2, "items": 3, "done": 1, "labels": 1,
        "mine": 2,
    }  # fmt: skip
    assert "unknown answer `x`" in done.stderr
    assert "no idea" not in done.stdout


def test_a_rating_is_typed_as_its_number(
    rlake: Command, lake: Store, typed: Callable[[str], None]
) -> None:
    lake.append("experiences", experiences(1, reward=1.0))
    typed("0\n4\n")
    assert rlake("label", "--labels", "1..5", "--annotator", "ann").returncode == 0
    assert lake.sql("SELECT label, score FROM feedback").fetchall() == [("4", 4.0)]


def test_feedback_of_one_experience_is_added_once(rlake: Command, lake: Store) -> None:
    lake.append("experiences", experiences(1, reward=1.0))
    given = ("feedback", "add", "g000/00", "--label", "good", "--score", 1, "--annotator", "ann")
    assert rlake(*given).stdout == "stored\n"
    assert rlake(*given).stdout == "already stored\n"
    assert labels(lake) == [("ann", "good", None)]
    refused(rlake("feedback", "add", "g000/0", "--label", "good"), "did you mean `g000/00`?")
    assert "give a `--label`" in rlake("feedback", "add", "g000/00").stderr


def test_labels_go_out_to_a_tool_and_come_back(rlake: Command, lake: Store, tmp_path: Path) -> None:
    lake.append("experiences", experiences(4, reward=[1.0, 0.0, 1.0, 0.0]))
    out = rlake(
        "feedback", "export", "--format", "label_studio", "--out", "asked.json", "--limit", 2
    )
    assert out.stdout == "wrote 2 items of queue review to asked.json\n"
    records = json.loads((tmp_path / "asked.json").read_text(encoding="utf-8"))
    for record in records:
        said = {"type": "choices", "value": {"choices": ["good"]}}
        record["annotations"] = [{"completed_by": n, "result": [said]} for n in (1, 2)]
    (tmp_path / "done.json").write_text(json.dumps(records), encoding="utf-8")
    come = ("feedback", "import", "done.json", "--format", "label_studio", "--queue", "review")
    assert "imported 4 labels" in rlake(*come).stdout
    assert "imported 0 labels from done.json, 4 already stored" in rlake(*come).stdout
    told = json.loads(rlake("feedback", "agreement", "--json").stdout)
    assert told["queues"][0]["num_items"] == 2
    assert told["queues"][0]["agreement"] == 1.0
    assert "1 " in rlake("feedback", "agreement").stdout
    done = rlake("feedback", "adjudicate", "--reviews", 2)
    assert "adjudicated 2 labels and 0 preferences" in done.stdout


def test_labels_of_rows_that_are_not_stored_are_refused_as_a_whole(
    rlake: Command, lake: Store, tmp_path: Path
) -> None:
    lake.append("experiences", experiences(1, reward=1.0))
    lines = [{"experience_id": i, "annotator": "a", "label": "good"} for i in ("g000/00", "x")]
    (tmp_path / "f.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    refused(
        rlake("feedback", "import", "f.jsonl"),
        "labels 1 experience that is not stored, such as `x`",
    )
    assert labels(lake) == []


def test_what_is_not_filled_in_or_there_twice_is_no_label(
    rlake: Command, lake: Store, tmp_path: Path
) -> None:
    lake.append("experiences", experiences(3, reward=1.0))
    assert rlake("feedback", "export", "--out", "asked.jsonl").returncode == 0
    first, *rest = (tmp_path / "asked.jsonl").read_text(encoding="utf-8").splitlines()
    filled = json.dumps(json.loads(first) | {"annotator": "ann", "label": "good"})
    (tmp_path / "done.jsonl").write_text("\n".join([filled, filled, *rest]), encoding="utf-8")
    assert "imported 1 label from" in rlake("feedback", "import", "done.jsonl").stdout
    assert labels(lake) == [("ann", "good", None)]
    nobody = json.dumps(json.loads(first) | {"label": "good"})
    (tmp_path / "nobody.jsonl").write_text(nobody, encoding="utf-8")
    words = "record 1 of `nobody.jsonl` holds no labels: `annotator` must be a name"
    refused(rlake("feedback", "import", "nobody.jsonl"), words)


def test_ctrl_c_ends_the_form_and_odd_bytes_are_a_comment(
    rlake: Command, lake: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.append("experiences", experiences(3, reward=1.0))
    lines = iter(["1 caf\udce9"])

    def typed(*_: object) -> str:
        for line in lines:
            return line
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", typed)
    done = rlake("label", "--annotator", "ann")
    assert (done.returncode, done.stdout) == (0, "1 label by ann; 1 of 3 items are done\n")
    assert labels(lake) == [("ann", "good", "caf?")]


def test_a_queue_of_another_question_is_refused(
    rlake: Command, lake: Store, typed: Callable[[str], None]
) -> None:
    lake.append("experiences", experiences(3, reward=1.0))
    typed("1\nq\n")
    assert rlake("label", "--annotator", "ann").returncode == 0
    words = "queue `review` has labels `good`, and this question offers `yes`, `no`"
    refused(rlake("label", "--annotator", "bob", "--labels", "yes,no"), words)


def test_an_address_that_is_taken_is_told(rlake: Command, lake: Store) -> None:
    lake.append("experiences", experiences(1, reward=1.0))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(rlake("label", "--web", "--port", port), "Address already in use")


@contextmanager
def page(lake: Store, *options: str) -> Iterator[str]:
    """Serve the form by a real process; give its address."""
    words = [sys.executable, "-m", "rlake.loop.cli", "--store", lake.uri, "label", "--web"]
    words += ["--port", "0", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, "it says where it is served"
            yield found[0]
        finally:
            process.kill()


@pytest.mark.slow
def test_people_label_in_a_real_browser_while_rows_are_appended(
    lake: Store, tmp_path: Path
) -> None:
    from support.browser import browser

    for i in range(3):
        text = f"<b id=bold>{i}</b>" + "x" * 10**6
        lake.append("experiences", experiences(i + 1, reward=1.0, response_text=text)[i:])
    options = ("--question", "Right?", "--labels", "good=1,</script>=0", "--reviews", "2")
    with page(lake, *options) as address, browser(tmp_path / "profile") as shown:
        assert httpx.get(f"{address}sql?q=SELECT 1").status_code == 404, "no other page is served"
        assert httpx.get(address, headers={"Host": "evil.example"}).status_code == 421
        shown.go(address)
        said = "document.querySelector('[role=status]').innerText"
        count = "document.querySelector('main .bar .soft').innerText"
        shown.wait(f"{said} === 'Say who you are.'")
        shown.value("document.querySelector('main input').focus()")
        shown.press("ann")
        shown.value("document.querySelector('main input').blur()")
        reply = "[...document.querySelectorAll('main .two pre')][0]?.innerText"
        shown.wait(f"{reply}?.startsWith('<b id=bold>')")
        assert shown.value(reply).endswith("… (900,016 more characters)")
        assert shown.value("document.getElementById('bold')") is None
        assert shown.value("document.querySelector('main').innerText.includes('Right?')")
        assert shown.value("document.querySelector('main').innerText.includes('</script>')")
        lake.append("experiences", experiences(1, experience_id="new"))
        shown.press("1")
        shown.wait(f"{count} === '0 of 3 done, 1 by you'")
        skipped = shown.value(reply)[:20]
        shown.press("s")
        shown.wait(f"{count} === '0 of 3 done, 2 by you'")
        shown.press("b")
        shown.wait(f"{reply}.startsWith('{skipped}')")
        shown.value(
            "[...document.querySelectorAll('button')].find(b => b.innerText.includes('</')).click()"
        )
        shown.wait(f"!{reply}.startsWith('{skipped}')")
        shown.press("1")
        shown.wait(f"{said}.startsWith('Nothing is left')")
        assert shown.value("document.querySelector('main .card').offsetParent") is None
        shown.value("localStorage.clear()")  # another person, whose browser knows no name
        shown.go(f"{address}label?annotator=bob")
        shown.wait(f"{count} === '0 of 3 done, 0 by you'")
        for done in (1, 2, 3):
            shown.press("1")
            shown.wait(f"{count}.startsWith('{done} of 3')")
        shown.go(f"{address}label?annotator={'x' * 81}")
        shown.wait("document.querySelector('.q-notification')?.innerText.includes('1 to 80')")
    assert [who for who, *_ in labels(lake)] == ["ann"] * 4 + ["bob"] * 3
    assert [label for _, label, _ in labels(lake)][:4] == ["good", None, "</script>", "good"]


@pytest.mark.slow
def test_a_form_for_other_machines_has_a_token(lake: Store) -> None:
    lake.append("experiences", experiences(1, reward=1.0))
    with page(lake, "--host", "0.0.0.0") as address:
        here = re.sub(r"//[^:]+:", "//127.0.0.1:", address)
        bare = here.partition("?")[0]
        assert [httpx.get(bare + one).status_code for one in ("", "label", "?token=x")] == [403] * 3
        with httpx.Client(follow_redirects=True) as client:
            assert client.get(here).status_code == 200


def test_feedback_on_no_experience_is_refused(rlake: Command, lake: Store) -> None:
    for name in ("", " "):
        refused(rlake("feedback", "add", name, "--score", "1"), "the experience's ID is empty")
    assert lake.count("feedback") == 0
