"""A disk that fills in mid-commit: nothing is stored, readers go on, the next append works."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.builders import task

from rlake.store import Store

APPEND = """
import json, random, resource, signal, sys
from pathlib import Path
import rlake
from rlake.store.errors import StoreError
place = sys.argv[1]
lake = rlake.connect(place)
def made(name=""):
    return [{"task_id": f"{name}{i}", "taskset": "s", "split": "x",
             "messages": random.Random(i).randbytes(25_000).hex()} for i in range(40)]
rows = made()
def append(rows, stream=False):
    if stream:
        return lake.append_stream("tasks", (rows[i : i + 8] for i in range(0, 40, 8)))
    return lake.append("tasks", rows)
def failed(*given):
    try:
        append(*given)
    except StoreError as error:
        return [str(error), lake.count("tasks"), rlake.connect(place).count("tasks")]
def worked(*given):
    return [append(*given).rows, append(*given).duplicates, lake.count("tasks")]
"""

LIMITED = (
    APPEND
    + """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that the write fails, as on a full disk
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
found = []
for stream in (False, True):
    for limit in (100_000, 200):  # in the file of the rows, and in that of the version
        given = made(f"{stream} {limit} "), stream
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        told = failed(*given)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        found.append([told, worked(*given)])
print(json.dumps(found))
"""
)

FILLED = (
    APPEND
    + """
lake.append("tasks", rows[:1])
filler = Path(place).parent / "filler"
filler.write_bytes(b"x" * (3 << 20))
told = failed(rows)
filler.unlink()
print(json.dumps([told, worked(rows)]))
"""
)


def run(*command: object) -> list[Any]:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_write_that_finds_no_room_stores_nothing_and_works_later(store: Store) -> None:
    store.append("tasks", [task(0)])
    for i, (failed, worked) in enumerate(run(sys.executable, "-c", LIMITED, store.uri)):
        before = 1 + 40 * i
        assert failed[0].startswith("cannot write to `tasks`: ")
        assert failed[0].endswith("nothing was stored")
        assert "File too large" in failed[0]
        assert failed[1:] == [before, before], "readers see what was there before"
        assert worked == [40, 40, before + 40]
    counts = store.sql("SELECT count(*), count(DISTINCT task_id) FROM tasks").fetchall()
    assert counts == [(161, 161)]


def test_a_full_disk_says_so_and_takes_the_append_when_there_is_room(tmp_path: Path) -> None:
    """A disk of 4 MB, mounted where only the process that writes to it sees it."""
    alone = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=4m tmpfs "$0" && exec "$@"']
    if subprocess.run([*alone, tmp_path, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a disk of 4 MB cannot be mounted here")
    lake = tmp_path / "lake"
    failed, worked = run(*alone, tmp_path, sys.executable, "-c", FILLED, lake)
    assert "No space left on device" in failed[0]
    assert failed[0].endswith("nothing was stored")
    assert failed[1:] == [1, 1]
    assert worked == [39, 40, 40]
    assert not lake.exists(), "it was on the small disk"


MAINTAINED = (
    APPEND
    + """
import os
for i in range(8):
    lake.append("tasks", rows[3 * i : 3 * i + 3])
    if i < 6:
        lake.maintain(grace=3600)  # merges, and keeps every version, with files of its own
for path in Path(place, ".locks").glob("maintain.*"):
    path.unlink()
filler = Path(place).parent / "filler"
with filler.open("wb", buffering=0) as file:
    try:
        while file.write(b"x" * 4096) == 4096:
            pass
    except OSError:
        pass
free = os.statvfs(place).f_bavail
try:
    lake.maintain(grace=0)
    said = ""
except StoreError as error:
    said = str(error)
print(json.dumps([free, said, os.statvfs(place).f_bavail > 50, lake.count("tasks")]))
"""
)


def test_a_store_on_a_full_disk_is_maintained(tmp_path: Path) -> None:
    """What nobody needs is removed before anything is written, and the lock needs no room."""
    alone = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=10m tmpfs "$0" && exec "$@"']
    if subprocess.run([*alone, tmp_path, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a disk of 10 MB cannot be mounted here")
    told = run(*alone, tmp_path, sys.executable, "-c", MAINTAINED, tmp_path / "lake")
    assert told == [0, "", True, 24]
