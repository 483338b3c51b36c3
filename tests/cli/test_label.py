"""`rlake label` and `rlake feedback`: in a terminal, in a browser's place, and from files."""

import json
import re
import socket
import subprocess
import sys
import threading
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
    words = [sys.executable, "-c", "from rlake.loop.cli import main; main()", "label", "--web"]
    words += ["--store", lake.uri, "--port", "0", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, "it says where it is served"
            yield found[0]
        finally:
            process.terminate()


def key_of(html: str) -> str:
    found = re.search(r'"key": "([^"]+)"', html)
    assert found
    return found[1]


def test_a_page_takes_labels_of_several_people_while_rows_are_appended(lake: Store) -> None:
    long = "<script>alert(1)" + "x" * 10**6
    lake.append("experiences", experiences(10, reward=1.0, response_text=long))
    options = ("--reviews", "2", "--labels", "good=1,</script>=0", "--annotator", "ann")
    with page(lake, *options) as address:
        html = httpx.get(address, timeout=100).text
        assert '"annotator": "ann"' in html
        assert "alert(1)" not in html
        assert html.count("</script>") == 1
        headers = {"X-Rlake-Key": key_of(html)}
        seen: list[tuple[str, str]] = []

        def work(who: str) -> None:
            with httpx.Client(base_url=address, headers=headers, timeout=100) as client:
                while item := client.get("item", params={"annotator": who}).json()["item"]:
                    seen.append((who, item["key"]))
                    assert item["first"].endswith("… (900,016 more characters)")
                    sent = {"annotator": who, "key": item["key"], "label": "good"}
                    assert client.post("label", json=sent).json() == {"stored": True}

        people = [threading.Thread(target=work, args=(who,)) for who in ("ann", "bob")]
        for one in people:
            one.start()
        for i in range(5):
            lake.append("experiences", experiences(1, experience_id=f"new{i}"))
        for one in people:
            one.join()
    assert len(seen) == len(set(seen)) == 20
    counts = lake.sql("SELECT count(DISTINCT annotator) FROM labels GROUP BY experience_id")
    assert counts.fetchall() == [(2,)] * 10


def test_the_page_refuses_what_does_not_come_from_it(lake: Store) -> None:
    lake.append("experiences", experiences(1, reward=1.0))
    sent = {"annotator": "eve", "key": "g000/00|", "label": "good"}
    with page(lake) as address, httpx.Client(base_url=address, timeout=100) as client:
        key = {"X-Rlake-Key": key_of(client.get("").text)}
        assert client.post("label", json=sent).status_code == 403
        assert client.get("", headers={"Host": "evil.example"}).status_code == 421
        long = client.post("label", json=sent | {"comment": "x" * 100_000}, headers=key)
        assert long.status_code == 413
        for wrong, told in (
            ({"label": "goood"}, "`goood` is not a label"),
            ({"key": "x"}, "has no item `x`"),
            ({"annotator": " "}, "1 to 80 valid characters"),
        ):
            answer = client.post("label", json=sent | wrong, headers=key)
            assert (answer.status_code, told in answer.json()["error"]) == (400, True)
        assert client.post("label", content=b"[", headers=key).status_code == 400
    assert labels(lake) == []


@pytest.mark.slow
def test_a_person_labels_in_a_real_browser(lake: Store, tmp_path: Path) -> None:
    from support.browser import browser

    lake.append("experiences", experiences(3, reward=1.0, response_text="<b id=bold>4</b>"))
    with page(lake, "--question", "Right?") as address, browser(tmp_path / "profile") as shown:
        shown.go(address)
        assert shown.value("document.getElementById('said').textContent") == "say who you are"
        shown.value("document.getElementById('annotator').focus()")
        shown.press("ann")
        shown.value("document.getElementById('annotator').blur()")
        shown.wait("document.getElementById('first').textContent === '<b id=bold>4</b>'")
        assert shown.value("document.getElementById('bold')") is None
        assert shown.value("document.getElementById('question').textContent") == "Right?"
        shown.picture(tmp_path / "page.png")
        for key, mine in (("1", 1), ("s", 2)):
            shown.press(key)
            shown.wait(
                f"!busy && document.getElementById('count').textContent.includes('{mine} by you')"
            )
        shown.press("b")  # back to the one that was skipped
        shown.wait("!busy")
        shown.value("document.querySelectorAll('#choices button')[1].click()")
        shown.wait("!busy && document.getElementById('count').textContent.startsWith('2 of 3')")
        shown.press("1")
        shown.wait("document.getElementById('form').hidden")
        assert shown.value("document.getElementById('said').textContent").startswith(
            "nothing is left"
        )
    assert [label for _, label, _ in labels(lake)] == ["good", None, "bad", "good"]
    assert (tmp_path / "page.png").stat().st_size > 5000


def test_feedback_on_no_experience_is_refused(rlake: Command, lake: Store) -> None:
    for name in ("", " "):
        refused(rlake("feedback", "add", name, "--score", "1"), "the experience's ID is empty")
    assert lake.count("feedback") == 0
