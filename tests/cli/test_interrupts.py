"""The first Ctrl-C or SIGTERM ends any command within two seconds, and nothing is half-written."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support import jobs
from support.audit import CLEAN, audit
from support.builders import experiences
from support.commands import Command, last_json

from rlake.loop.cli import run_command
from rlake.store import Experience, Store, Task, connect
from rlake.store.corruption import examine
from rlake.store.doctor import diagnose
from rlake.store.locks import LOCKS

RLAKE = [sys.executable, "-c", "from rlake.loop.cli import main; main()"]
ENDLESS = "SELECT count(*) FROM tasks a, tasks b, tasks c, tasks d WHERE a.answer < b.answer"
INTERRUPTED = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
SECONDS = 2.0
SLOWER = 4
"""What a machine that does much else may add."""


def start(folder: Path, *args: str) -> "subprocess.Popen[str]":
    """Start a command, and return when it listens to signals: from then on it opens the store."""
    process = subprocess.Popen(
        [*RLAKE, *args], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until(lambda: listens(process), "it never listened to signals", process)
    return process


def listens(process: "subprocess.Popen[str]") -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    [caught] = [line.split()[1] for line in status if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def until(holds: Callable[[], object], otherwise: str, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 100
    while not holds():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def end(process: "subprocess.Popen[str]", sign: signal.Signals = signal.SIGINT) -> tuple[int, str]:
    """Send a signal, and return the exit code and what was said; in time, or it fails."""
    began = time.monotonic()
    process.send_signal(sign)
    said = process.communicate(timeout=100)[1]
    assert time.monotonic() - began < SECONDS * SLOWER
    return process.returncode, said


@pytest.mark.parametrize(("sign", "code"), INTERRUPTED)
def test_a_long_query_ends(tmp_path: Path, sign: signal.Signals, code: int) -> None:
    lake = connect(tmp_path / "lake")
    lake.append("tasks", [Task.ask(f"{i}+1=", str(i + 1)) for i in range(2000)])
    assert end(start(tmp_path, "sql", ENDLESS), sign) == (code, "error: interrupted\n")


def test_a_query_that_takes_longer_than_it_may_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = connect(tmp_path / "lake")
    lake.append("tasks", [Task.ask(f"{i}+1=", str(i + 1)) for i in range(2000)])
    assert run_command(["sql", ENDLESS, "--timeout", "0.2", "--store", lake.uri]) == 1
    assert capsys.readouterr().err.startswith("error: the query took longer than it was given")
    assert run_command(["sql", "SELECT 1", "--timeout", "60", "--store", lake.uri]) == 0


def test_a_query_that_may_take_longer_than_it_does_ends_quietly(tmp_path: Path) -> None:
    connect(tmp_path / "lake")
    command = [*RLAKE, "sql", "SELECT 1", "--timeout", "60", "--format", "csv"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n1\n", "")


def test_queries_have_a_memory_limit(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = "SELECT current_setting('memory_limit')"
    [(told,)] = store.sql(limit).fetchall()
    assert float(told.split()[0]) > 0
    store.append("tasks", [Task.ask(f"{i}+1=", str(i + 1)) for i in range(2000)])
    monkeypatch.setenv("RLAKE_SQL_MEMORY", "60MB")
    large = "SELECT list(a.messages || b.messages) FROM tasks a, tasks b"
    assert run_command(["sql", large, "--store", store.uri]) == 2
    assert "set `RLAKE_SQL_MEMORY`" in capsys.readouterr().err
    monkeypatch.setenv("RLAKE_SQL_MEMORY", "lots")
    assert run_command(["sql", "SELECT 1", "--store", store.uri]) == 2
    assert "`RLAKE_SQL_MEMORY` is 'lots', expected a size" in capsys.readouterr().err


def test_an_import_of_many_rows_ends_while_they_are_stored(tmp_path: Path) -> None:
    many = (
        json.dumps({"prompt_text": f"{i}+{i}=", "response_text": str(2 * i)}) for i in range(60_000)
    )
    (tmp_path / "many.jsonl").write_text("\n".join(many))
    importing = start(tmp_path, "import", "experiences", "many.jsonl")
    data = tmp_path / "lake" / "tasks.lance" / "data"
    until(lambda: data.is_dir() and any(data.iterdir()), "no file was written", importing)
    code, said = end(importing)
    assert (code, said.splitlines()[-1]) == (130, "error: interrupted")
    lake = connect(tmp_path / "lake")
    assert lake.count("experiences") in (0, 60_000)
    assert lake.count("tasks") in (0, 60_000)


@pytest.mark.parametrize(
    ("job", "sign", "code"),
    [
        pytest.param("explore", signal.SIGINT, 130, marks=pytest.mark.slow),
        ("train", signal.SIGTERM, 143),
    ],
)
def test_a_job_that_waits_for_the_other_ends_and_is_on_record(
    tmp_path: Path, job: str, sign: signal.Signals, code: int
) -> None:
    waiting = jobs.start(tmp_path, job, "small.yaml")
    lake = tmp_path / "lake"

    def runs() -> bool:
        opened = jobs.opened(lake)
        return opened is not None and opened.count("job_events") > 0

    until(runs, "it never began", waiting)
    ended, said = end(waiting, sign)
    assert (ended, said.splitlines()[-1]) == (code, "error: interrupted")
    found = connect(lake).sql("SELECT job, status FROM runs").fetchall()
    assert found == [(job, "interrupted")]


def test_an_export_leaves_no_file_of_that_name(tmp_path: Path) -> None:
    lake = connect(tmp_path / "lake")
    lake.append("experiences", experiences(4_000, response_text="four" * 1000))
    exporting = start(tmp_path, "export", "experiences", "--out", "out.jsonl")
    until(lambda: any(p.name.startswith("out") or ".part" in p.name for p in tmp_path.iterdir()),
          "nothing was written", exporting)  # fmt: skip
    code, _ = end(exporting)
    out = tmp_path / "out.jsonl"  # whole, when the signal came after it had its name
    assert code == 130 or out.exists()
    assert not out.exists() or out.read_text().count("\n") == 4_000


JUDGES = """
import asyncio, time
from pathlib import Path

def rest():
    if not Path("quick").exists():
        Path("asked").touch()
        return 1000
    return 0

def waits(task, experience):
    time.sleep(rest())
    return 1.0

async def awaits(task, experience):
    await asyncio.sleep(rest())
    return 1.0
"""
JUDGED = """
name: judged
source:
  sql: >-
    SELECT e.*, t.answer FROM experiences e JOIN tasks t USING (task_id)
operators:
  - score: {{reward: "judges:{judge}"}}
sink: {{table: scores}}
"""
MANY = 60_000
MADE = f"""
name: made
source:
  sql: >-
    SELECT experience_id || '/' || i AS experience_id, task_id, group_id, i AS rollout_index,
    'synthetic' AS source, repeat(response_text, 50) AS response_text, experience_id AS parent_id
    FROM experiences, range({MANY // 4}) r(i) WHERE parent_id IS NULL
operators: []
sink: {{table: experiences}}
"""


def is_sound(lake: Store, acknowledged: Sequence[Experience]) -> bool:
    """Tell whether nothing is lost, twice or changed, and nothing for the doctor to do."""
    found = [f for f in (*examine(lake), *diagnose(lake)) if f.level == "error"]
    return (audit(lake, [str(e.experience_id) for e in acknowledged]), found) == (CLEAN, [])


@pytest.mark.parametrize(
    ("judge", "sign", "code"), [("waits", signal.SIGINT, 130), ("awaits", signal.SIGTERM, 143)]
)
def test_a_pipeline_ends_while_a_judge_is_asked_and_the_next_run_does_all(
    rlake: Command,
    tmp_path: Path,
    judge: str,
    sign: signal.Signals,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lake = connect(tmp_path / "lake")
    asked = Task.ask("1+1=", "2")
    lake.append("tasks", [asked])
    made = experiences(8, task_id=asked.task_id, reward=0.0)
    lake.append("experiences", made)
    (tmp_path / "judges.py").write_text(JUDGES)
    (tmp_path / "judged.yaml").write_text(JUDGED.format(judge=judge))
    running = start(tmp_path, "pipeline", "run", "judged.yaml")
    until((tmp_path / "asked").exists, "the judge was never asked", running)
    assert end(running, sign) == (code, "error: interrupted\n")
    assert [lake.count(n) for n in ("scores", "lineage", "drops", "operator_errors")] == [
        0,
        0,
        0,
        0,
    ]
    (tmp_path / "quick").touch()
    monkeypatch.syspath_prepend(tmp_path)
    report = last_json(rlake("pipeline", "run", "judged.yaml", "--json"))
    del sys.modules["judges"]
    assert (report["rows_in"], report["rows_out"], lake.count("scores")) == (8, 8, 8)
    assert is_sound(lake, made)


def test_a_pipeline_ends_while_it_stores_and_the_next_run_stores_the_rest(
    rlake: Command, tmp_path: Path
) -> None:
    lake = connect(tmp_path / "lake")
    made = experiences(4, response_text="four")
    lake.append("experiences", made)
    (tmp_path / "made.yaml").write_text(MADE)
    data = tmp_path / "lake" / "experiences.lance" / "data"
    before = {*data.iterdir()}
    running = start(tmp_path, "pipeline", "run", "made.yaml")
    until(lambda: {*data.iterdir()} - before, "no file was written", running)
    assert end(running, signal.SIGTERM) == (143, "error: interrupted\n")
    stored, runs = lake.count("experiences") - 4, lake.count("lineage")
    assert 0 <= stored <= MANY
    assert not runs or stored == MANY, "a run that did not store everything is not on record"
    report = last_json(rlake("pipeline", "run", "made.yaml", "--full", "--json"))
    # ids that the source finds in the table already are not written again, and not counted
    assert (report["rows_out"], report["already"]) == (MANY - stored, 0)
    assert (lake.count("experiences"), lake.count("lineage")) == (MANY + 4, runs + 1)
    assert is_sound(lake, made)


@pytest.mark.parametrize(
    ("moment", "sign", "code"), [("begun", signal.SIGINT, 130), ("merging", signal.SIGTERM, 143)]
)
def test_maintenance_ends_at_any_moment_and_the_next_one_does_the_rest(
    rlake: Command, tmp_path: Path, moment: str, sign: signal.Signals, code: int
) -> None:
    lake = connect(tmp_path / "lake")
    made = experiences(4000, response_text="four" * 500)
    for i in range(0, 4000, 200):
        lake.append("experiences", made[i : i + 200])
    lake.branch("b")
    data = tmp_path / "lake" / "experiences.lance" / "data"
    before = {*data.iterdir()}
    running = start(tmp_path, "maintain", "--grace", "0")
    if moment == "begun":
        note = tmp_path / "lake" / LOCKS / f"{lake.lock_name('maintain')}.json"
        until(note.exists, "it never began", running)
    else:
        until(lambda: {*data.iterdir()} - before, "nothing was merged", running)
    assert end(running, sign) == (code, "error: interrupted\n")
    assert is_sound(connect(lake.uri), made)
    assert rlake("maintain", "--grace", "0").returncode == 0
    lake = connect(lake.uri)
    assert len(lake.dataset("experiences").get_fragments()) == 1
    assert lake.on_branch("b").count("experiences") == 4000
    assert is_sound(lake, made)
