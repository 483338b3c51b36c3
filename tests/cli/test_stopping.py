"""A full disk, a kill, an interrupt, a closed pipe: real processes leave nothing half-written."""

import signal
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from time import monotonic, sleep

import pytest
from support.commands import Command, last_json
from support.files import write

from rlake.store import Store, Task
from rlake.store.files import import_rows, open_input

RLAKE = [sys.executable, "-c", "from rlake.loop.cli import main; main()"]
FULL_DISK = """
import resource
from rlake.loop.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
main()
"""


def on_a_full_disk(folder: Path, *args: str) -> CompletedProcess[str]:
    """Run a command that can write no file of more than 100 kB."""
    command = [sys.executable, "-c", FULL_DISK, *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_full_disk_is_said_and_nothing_is_stored_or_written(lake: Store, tmp_path: Path) -> None:
    filler = "".join(chr(33 + i * i % 90) for i in range(1000))
    many = [{"prompt_text": f"{i} {filler[i:]}", "response_text": "4"} for i in range(900)]
    write(tmp_path / "many.jsonl", *many)
    said = on_a_full_disk(tmp_path, "import", "experiences", "many.jsonl")
    assert said.returncode == 1
    assert said.stderr.startswith("error: cannot write a temporary file: File too large; ")
    assert said.stderr.endswith("; nothing was stored\n")
    assert (lake.count("tasks"), lake.count("experiences")) == (1, 0)

    with open_input(tmp_path / "many.jsonl") as file:
        assert import_rows(lake, "experiences", file).rows == 900
    (tmp_path / "out.jsonl").write_text("an older export")
    said = on_a_full_disk(tmp_path, "export", "experiences", "--out", "out.jsonl")
    said_of = "cannot write `out.jsonl`: File too large; nothing was written"
    assert (said.returncode, said.stderr) == (1, f"error: {said_of}\n")
    assert (tmp_path / "out.jsonl").read_text() == "an older export"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lake", "many.jsonl", "out.jsonl"]


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "ctrl-c"])
def test_an_import_that_was_stopped_is_run_again_without_duplicates(
    rlake: Command, lake: Store, tmp_path: Path, sign: signal.Signals
) -> None:
    many = [{"prompt_text": f"{i}+{i}=", "response_text": str(2 * i)} for i in range(5_000)]
    write(tmp_path / "many.jsonl", *many)
    command = [*RLAKE, "import", "experiences", "many.jsonl", "--json"]
    data = tmp_path / "lake" / "experiences.lance" / "data"
    importing = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = monotonic() + 200
    while not (data.is_dir() and any(data.iterdir())):
        assert importing.poll() is None, "it ended before it could be killed"
        assert monotonic() < deadline, "no data file of the import was seen in 200 s"
        sleep(0.002)
    importing.send_signal(sign)
    said = importing.communicate()[1]
    if sign is signal.SIGKILL:
        assert importing.returncode == -9
    else:
        assert (importing.returncode, said) == (130, "error: interrupted\n")
    stored, tasks = lake.count("experiences"), lake.count("tasks") - 1
    assert stored in (0, 5_000), "an import is all there or not at all"
    assert tasks in (stored, 5_000), "and no table before what it refers to"

    done = last_json(rlake("import", "experiences", "many.jsonl", "--json"))
    assert (done["rows"], done["already"], done["tasks"]) == (5_000 - stored, stored, 5_000 - tasks)
    distinct = (
        "SELECT count(*), count(DISTINCT experience_id), count(DISTINCT task_id) FROM experiences"
    )
    assert lake.sql(distinct).fetchall() == [(5_000, 5_000, 5_000)]
    assert lake.count("tasks") == 1 + 5_000


def test_output_that_nobody_reads_any_more_ends_quietly(lake: Store, tmp_path: Path) -> None:
    lake.append("tasks", [Task.ask(f"{i}=" * 50) for i in range(3000)])
    command = [*RLAKE, "sql", "SELECT * FROM tasks", "--json"]
    reading = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert reading.stdout is not None
    assert reading.stderr is not None
    assert reading.stdout.readline() == "[\n"
    reading.stdout.close()
    assert reading.stderr.read() == ""
    assert reading.wait(100) == 141
    reading.stderr.close()
