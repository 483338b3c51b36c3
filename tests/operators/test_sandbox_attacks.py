"""What code under test tries on others: each snippet is real, and so is whom it is tried on."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rlake.operators.rewards import Verdict, code_tests
from rlake.operators.sandbox import Ended, Limits, jail, protection, run_python
from rlake.operators.sandbox.syscalls import allowed
from rlake.store import Experience, Task
from rlake.store.errors import JobError

QUICK = Limits(seconds=8.0, memory=256 << 20, disk=16 << 20, processes=16)
BARE = replace(QUICK, namespaces=False)
IS_ROOT = os.geteuid() == 0
USER = {"user": jail.NOBODY, "group": jail.NOBODY} if IS_ROOT else {}
"""Whose code it is without namespaces: nobody's when we are root, else ours."""
CALL = "import ctypes, os, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"
REFUSED = "\nassert made == -1 and ctypes.get_errno() in (1, 38), (made, ctypes.get_errno())\n"


def end(source: str, limits: Limits = BARE) -> Ended:
    return asyncio.run(run_python(source, limits=limits))


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python that also another user may read; without namespaces the code is one."""
    for path in (sys.executable, shutil.which("python3", path="/usr/bin:/bin") or sys.executable):
        with suppress(PermissionError):
            subprocess.run([os.path.realpath(path), "-c", ""], check=True, **USER)  # type: ignore[arg-type]  # pyright: ignore
            monkeypatch.setattr(sys, "executable", path)
            return path
    pytest.skip("another user may read no Python here")


@pytest.fixture
def other() -> Iterator[int]:
    """Another process of the user that the code is."""
    process = subprocess.Popen(["sleep", "60"], cwd="/", **USER)  # type: ignore[arg-type]  # pyright: ignore
    yield process.pid
    assert process.poll() is None, "it was reached"
    process.kill()
    process.wait()


ON_OTHERS = {
    "its memory": "open(f'/proc/{other}/mem', 'r+b')",
    "what it opened": "os.listdir(f'/proc/{other}/fd')",
    "its limits": "import resource\nresource.prlimit(other, resource.RLIMIT_NOFILE, (0, 0))",
    "a signal of a file": (
        "import fcntl\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, other)\n"
        "fcntl.fcntl(r, 10, 9)\nfcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')"
    ),
    "a signal of a file, asked otherwise": (
        "import fcntl, struct\nr, w = os.pipe()\nfcntl.ioctl(r, 0x8901, struct.pack('i', other))"
    ),
    "a signal": "os.kill(other, 9)",
    "where it runs": "os.sched_setaffinity(other, {0})",
    "its turn": "os.setpriority(os.PRIO_PROCESS, other, 19)",
    "a socket of the machine": (
        "import socket as s\na, b = s.socketpair(type=s.SOCK_DGRAM)\na.sendto(b'x', '/dev/log')"
    ),
}


@pytest.mark.parametrize("what", ON_OTHERS)
def test_without_namespaces_no_other_process_of_the_user_is_reached(
    what: str, python: str, other: int
) -> None:
    ended = end(f"import os\nother = {other}\n{ON_OTHERS[what]}\nprint('reached')")
    assert ended.output == ""
    assert "PermissionError" in ended.errors, ended


@pytest.mark.parametrize("opens", ["open({0!r})", "open({0!r}, 'a')", "os.listdir({1!r})"])
def test_without_namespaces_no_file_of_the_user_is_read_or_written(
    opens: str, python: str, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_text("secret")
    for path in (file, *file.parents):
        if path.stat().st_uid == os.geteuid() and tmp_path.parents[1] in (path, *path.parents):
            path.chmod(0o777)
    ended = end("import os\n" + opens.format(str(file), str(tmp_path)))
    assert "PermissionError: [Errno 13]" in ended.errors, ended
    assert file.read_text() == "secret"


BY_NUMBER = {
    "io_uring": "made = libc.syscall(425, 8, ctypes.create_string_buffer(256))",
    "namespaces": "made = libc.unshare(0x10000000)",
    "namespaces of a clone": "made = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "made = libc.syscall(435, ctypes.create_string_buffer(88), 88)",
    "memory of no file": "made = libc.syscall(319, b'x', 0)",
    "shared memory": "made = libc.shmget(0, 1 << 24, 0o1600)",
    "a keyring": "made = libc.syscall(248, b'user', b'x', b'y', 1, -3)",
    "a mount": "made = libc.mount(b'x', b'.', b'tmpfs', 0, None)",
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.parametrize("what", BY_NUMBER)
def test_calls_that_no_limit_bounds_are_refused(
    what: str, python: str, *, namespaces: bool
) -> None:
    source = CALL + BY_NUMBER[what] + REFUSED + "print('refused')"
    ended = end(source, replace(QUICK, namespaces=namespaces))
    assert ended.output == "refused\n", ended


@pytest.mark.parametrize("namespaces", [True, False])
def test_memory_of_all_processes_together_is_bounded(python: str, *, namespaces: bool) -> None:
    several = (
        "import os, time\nfor i in range(6):\n if os.fork() == 0:\n"
        "  x = bytearray(b'x') * (80 << 20); time.sleep(9)\ntime.sleep(9)"
    )
    ended = end(several, replace(QUICK, seconds=30.0, namespaces=namespaces))
    assert (ended.how, ended.detail) == ("memory", "memory")


def test_a_signal_to_its_own_group_ends_the_code_and_not_the_sandbox(
    python: str, tmp_path: Path
) -> None:
    """The supervisor is of the code's user here, so that nothing else protects it."""
    folder = Path("/tmp", f"rlake-group-{os.getpid()}")
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    try:
        (folder / "main.py").write_text("import os; os.kill(0, 9)")
        program = shutil.copy(str(jail.__file__), folder / "confining.py")
        told, tells = os.pipe()
        calls = {"isolated": allowed(os.uname().machine, namespaces=True), "bare": None}
        config = {**asdict(QUICK), "folder": str(folder), "tells": tells, "calls": calls}
        command = [python, "-I", "-S", str(program), json.dumps(config)]
        options = {**USER, "pass_fds": [tells], "start_new_session": True, "cwd": folder}
        ran = subprocess.run(command, check=False, **options)  # type: ignore[arg-type]  # pyright: ignore
        os.close(tells)
        with os.fdopen(told) as said:
            text = said.read()
    finally:
        shutil.rmtree(folder)
    assert ran.returncode == 0
    if "namespaces" in text or '"isolated": false' in text:
        pytest.skip(f"no user makes namespaces here: {text}")
    assert json.loads(text) == {"isolated": True, "code": -9}


def test_code_that_ends_its_group_is_a_crash_and_worth_nothing() -> None:
    task = Task.ask("?", metadata={"tests": ["assert f() == 1"]})
    row = Experience(task_id="t", response_text="import os\nos.kill(0, 9)\ndef f(): return 1")
    assert asyncio.run(code_tests(task, row)) == Verdict(0.0, "0 of 1 passed; crash")


def test_where_nothing_confines_it_code_is_refused_unless_that_is_wanted(python: str) -> None:
    nothing = replace(BARE, landlock=False)
    with pytest.raises(JobError, match=r"cannot keep files from it.*`sandbox: unconfined`"):
        end("print(1)", nothing)
    assert end("print(1)", replace(nothing, unconfined=True)).output == "1\n"
    ended = end("import socket; socket.socket()", replace(nothing, unconfined=True))
    assert ended.how == "network"  # the list of calls holds all the same


def test_ordinary_programs_run_all_the_same(python: str) -> None:
    source = (
        "import asyncio, sqlite3, subprocess, tempfile, threading\n"
        "t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()\n"
        "print(subprocess.run(['/bin/echo', 'child'], capture_output=True, text=True).stdout)\n"
        "asyncio.run(asyncio.sleep(0))\n"
        "from concurrent.futures import ProcessPoolExecutor as Pool\n"
        "with tempfile.TemporaryDirectory() as d: open(d + '/x', 'w').write('y')\n"
        "sqlite3.connect('x.db').execute('create table a (b)')\nprint('done')"
    )
    for limits in (BARE, QUICK):
        ended = end(source, limits)
        assert (ended.how, ended.output.split()) == ("done", ["thread", "child", "done"]), ended


def test_the_protection_that_there_is_is_said() -> None:
    assert protection().startswith(("namespaces", "Landlock", "nothing"))
