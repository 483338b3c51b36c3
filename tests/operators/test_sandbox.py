"""Code under test that attacks: a real process each, and each ends with a name for how."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlake.operators.rewards import Verdict, code_tests
from rlake.operators.sandbox import Ended, Limits, protection, run_python
from rlake.store import Experience, Task
from rlake.store.errors import JobError

SMALL = Limits(seconds=60.0, memory=256 << 20, disk=4 << 20, processes=16)
QUICK = replace(SMALL, seconds=1.0)
"""For what is to end by its time."""
ISOLATED = protection().startswith("namespaces")
isolated = pytest.mark.skipif(not ISOLATED, reason=f"no namespaces here: {protection()}")


def end(source: str, stdin: str = "", limits: Limits = SMALL) -> Ended:
    return asyncio.run(run_python(source, stdin=stdin, limits=limits))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each attack no process of a sandbox goes on."""
    yield
    assert not _running(below=os.getpid())
    # One without its parents may be another worker's, about to be killed; ours would go on.
    deadline = time.monotonic() + 10
    while orphans := _running(below=None):
        assert time.monotonic() < deadline, orphans
        time.sleep(0.05)


def _running(*, below: int | None) -> list[Path]:
    """Return the processes of sandboxes below a process, or below neither this one nor a worker."""
    found = [p.parent for p in Path("/proc").glob("[0-9]*/cmdline") if _is_of_sandbox(_read(p))]
    if below is not None:
        return [process for process in found if below in _ancestors(process)]
    return [process for process in found if not {os.getpid(), os.getppid()} & _ancestors(process)]


def _is_of_sandbox(command: bytes) -> bool:
    return b"main.py" in command and b"-B" in command


def _ancestors(process: Path) -> set[int]:
    above: set[int] = set()
    while (number := _parent(process)) > 1:
        above.add(number)
        process = Path(f"/proc/{number}")
    return above


def _parent(process: Path) -> int:
    status = _read(process / "status").decode().splitlines()
    return next((int(line.split()[1]) for line in status if line.startswith("PPid")), 0)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_program_reads_its_input_and_prints() -> None:
    ended = end("print(int(input()) * 2)", "21\n")
    assert (ended.how, ended.output, ended.code) == ("done", "42\n", 0)


ATTACKS = {
    "loops": ("while True: pass", "timeout"),
    "sleeps": ("import time; time.sleep(99)", "timeout"),
    "ignores signals": (
        "import signal, time\nfor s in (1, 2, 14, 15): signal.signal(s, signal.SIG_IGN)\n"
        "time.sleep(99)",
        "timeout",
    ),
    "forks without end": ("import os\nwhile True: os.fork()", "processes or timeout"),
    "starts threads": (
        "import threading, time\nfor _ in range(999): "
        "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "processes",
    ),
    "fills the disk": ("f = open('x', 'wb')\nwhile True: f.write(b'0' * 10**6)", "disk"),
    "eats memory": ("x = []\nwhile True: x.append(bytearray(10**7))", "memory"),
    "prints without end": ("while True: print('x' * 999)", "output"),
    "writes errors without end": ("import sys\nwhile True: sys.stderr.write('x' * 999)", "output"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "crash"),
    "raises its limits": (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "error",
    ),
    "is no program": ("def f(:", "error"),
    "exits with a status": ("import sys; sys.exit(3)", "error"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_ends_with_its_name(attack: str) -> None:
    source, how = ATTACKS[attack]
    began = time.monotonic()
    ended = end(source, limits=QUICK if "timeout" in how else SMALL)
    assert ended.how in how.split(" or "), ended
    assert ended.detail.startswith(ended.how)
    assert len(ended.output) + len(ended.errors) <= 2 * QUICK.output
    assert time.monotonic() - began < 50


@pytest.mark.parametrize("status", [1, 3, 127, 137, 255])
def test_an_exit_status_is_the_codes_own_and_looks_like_nothing_else(status: int) -> None:
    ended = end(f"import os; os._exit({status})")
    assert (ended.how, ended.code) == ("error", status)


def test_what_leaves_its_session_and_its_parent_is_ended_too() -> None:
    daemon = (
        "import os, time\nif os.fork() == 0:\n os.setsid()\n"
        " if os.fork() == 0:\n  os.close(1); os.close(2); time.sleep(99)\n os._exit(0)\n"
    )
    assert end(daemon).how == "done"  # the fixture looks whether it lives


@isolated
@pytest.mark.parametrize(
    ("source", "how", "detail"),
    [
        ("import socket; socket.create_connection(('127.0.0.1', 80))", "network", "unreachable"),
        ("import socket; socket.create_connection(('192.0.2.1', 80))", "network", "unreachable"),
        ("open('/etc/passwd')", "error", "FileNotFoundError"),
        (f"open({str(Path(__file__))!r})", "error", "FileNotFoundError"),
        ("open('/usr/lib/x', 'w')", "error", "Read-only"),
        (
            "import os\ntry: os.kill(1, 9)\nexcept PermissionError: pass\nopen('/etc/passwd')",
            "error",
            "FileNotFoundError",
        ),
        ("import os\nfor i in range(10**5): open(f'{i}', 'w').close()", "disk", "No space"),
    ],
)
def test_namespaces_keep_out_network_files_and_processes(
    source: str, how: str, detail: str
) -> None:
    ended = end(source)
    assert ended.isolated
    assert ended.how == how, ended
    assert detail in ended.detail


@isolated
def test_the_code_is_another_user_with_no_environment() -> None:
    told = end("import os; print(os.getuid(), os.environ.get('HOME'), os.listdir('.'))")
    assert told.output == "65534 None ['main.py']\n"


@pytest.mark.parametrize(
    ("source", "how"),
    [
        ("print(6 * 7)", "done"),
        ("import socket; socket.socket()", "network"),
        ("import urllib.request as r; r.urlopen('http://127.0.0.1:1')", "network"),
        ("import os; os.kill(os.getppid(), 9)", "error"),
        ("import os; os.kill(-1, 9)", "error"),
        ("import os\nwhile True:\n try: os.fork(); os.setsid()\n except OSError: pass", "timeout"),
    ],
)
def test_without_namespaces_no_socket_no_signal_and_nothing_left(source: str, how: str) -> None:
    try:
        limits = QUICK if how == "timeout" else SMALL
        ended = end(source, limits=replace(limits, namespaces=False))
    except JobError as error:
        pytest.skip(f"its Python is not readable by another user: {error}")
    assert (ended.how, ended.isolated) == (how, False), ended


def test_many_run_at_once_and_in_a_thread() -> None:
    async def several() -> list[str]:
        ran = await asyncio.gather(*(run_python(f"print({i})") for i in range(6)))
        return [ended.output for ended in ran]

    seen: list[list[str]] = []
    thread = threading.Thread(target=lambda: seen.append(asyncio.run(several())))
    thread.start()
    thread.join(100)
    assert seen == [[f"{i}\n" for i in range(6)]]


def test_a_sandbox_that_is_given_up_leaves_nothing() -> None:
    async def given_up() -> None:
        async with asyncio.timeout(0.5):
            await run_python("import time; time.sleep(99)", limits=Limits(seconds=90))

    with pytest.raises(TimeoutError):
        asyncio.run(given_up())
    time.sleep(0.2)


@pytest.mark.slow  # 3 s: it starts a Python that loads us
def test_a_sandbox_ends_with_the_process_that_started_it() -> None:
    source = (
        "import asyncio; from rlake.operators.sandbox import *\n"
        "asyncio.run(run_python('import time; time.sleep(99)', limits=Limits(seconds=90)))"
    )
    starter = subprocess.Popen([sys.executable, "-c", source])
    until = time.monotonic() + 100
    while not _sandboxes() and time.monotonic() < until:
        time.sleep(0.05)
    assert _sandboxes()
    starter.kill()
    starter.wait()
    while _sandboxes() and time.monotonic() < until:
        time.sleep(0.05)
    assert not _sandboxes()


def _sandboxes() -> list[bytes]:
    told = [_read(p) for p in Path("/proc").glob("[0-9]*/cmdline")]
    return [t for t in told if b"-B\0main.py" in t]


# --- the reward -----------------------------------------------------------------------------------


def judged(code: str | None, tests: object, **parameters: object) -> Verdict | None:
    task = Task.ask("?", metadata={"tests": tests} if tests is not None else None)
    row = Experience(task_id="t", response_text=code)
    return asyncio.run(code_tests(task, row, **parameters))  # type: ignore[arg-type]


DOUBLE = ["assert f(2) == 4", "assert f(3) == 6"]


@pytest.mark.parametrize(
    ("code", "value", "detail"),
    [
        ("def f(x): return 2 * x", 1.0, "2 of 2 passed"),
        ("Sure:\n```python\ndef f(x):\n    return 2 * x\n```\nDone.", 1.0, "2 of 2 passed"),
        ("def f(x): return x ** 2", 0.0, "1 of 2 passed; AssertionError"),
        ("def f(x): return 1 / 0", 0.0, "0 of 2 passed; ZeroDivisionError: division by zero"),
        ("def g(x): return x", 0.0, "0 of 2 passed; NameError"),
        ("def f(x):\n    while True: pass", 0.0, "0 of 2 passed; timeout"),
        ("raise SystemExit(0)", 0.0, "it ended before the tests"),
        (
            "import __main__ as m, os\nprint(m._mark, 99, flush=True)\nos._exit(0)",
            0.0,
            "ended before",
        ),
        ("import __main__ as m, os\nprint(m._mark, flush=True)\nos._exit(0)", 0.0, "ended before"),
        ("import os; os._exit(0)", 0.0, "it ended before the tests"),
        ("print('0' * 32, '2')\nraise SystemExit", 0.0, "it ended before the tests"),
        ("def f(x): return 2 * x\nprint('done', end='')", 1.0, "2 of 2 passed"),
        ("", 0.0, "0 of 2 passed; NameError"),
        ("x = '''", 0.0, "SyntaxError"),
    ],
)
def test_code_is_rewarded_by_its_tests(code: str, value: float, detail: str) -> None:
    made = judged(code, DOUBLE, seconds=1.0 if "timeout" in detail else 60.0)
    assert made is not None
    assert made.value == value
    assert detail in (made.detail or "")


def test_programs_are_judged_by_what_they_print() -> None:
    cases = [{"input": "2\n", "output": "4"}, {"input": "3\n", "output": "6 \n"}]
    right, half = "print(2 * int(input()))", "print(int(input()) ** 2)"
    assert judged(right, cases) == Verdict(1.0, "2 of 2 passed")
    assert judged(half, cases, share=True) == Verdict(0.5, "1 of 2 passed; printed '9\\n'")


def test_a_task_without_tests_is_null_and_one_with_odd_tests_an_error() -> None:
    assert judged("x = 1", None) is None
    with pytest.raises(ValueError, match="`tests` of a task must be Python statements"):
        judged("x = 1", [{"in": 1}])


def test_no_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    end("open('x', 'w').write('y')")
    assert not list(tmp_path.iterdir())
