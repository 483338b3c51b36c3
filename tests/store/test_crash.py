"""Real processes that are killed, and that write at the same time."""

import signal
import subprocess
import time

from support.builders import experiences
from support.processes import said, start, tell

from rlake.store import Store, connect

WRITER = """
import sys
import rlake
from support.builders import experiences
store = rlake.connect(sys.argv[1])
"""

APPENDS = (
    WRITER
    + """
made = experiences(4 * 10_000, reward=1.0)
for start in range(0, len(made), 4):
    store.append("experiences", made[start : start + 4])
    print(start // 4, flush=True)
"""
)

STREAM = (
    WRITER
    + """
import time
made = experiences(4000, reward=1.0)
def batches():
    for start in range(0, len(made), 400):
        yield made[start : start + 400]
        print(start, flush=True)
    time.sleep(60)
store.append_stream("experiences", batches())
"""
)

MINE_AND_OURS = (
    WRITER
    + """
me = int(sys.argv[2])
ours = experiences(40, reward=1.0)
mine = [e for e in experiences(200, reward=1.0)[40:] if int(e.group_id[1:]) % 4 == me]
print("ready", flush=True)
sys.stdin.readline()
new = 0
for i in range(10):
    new += store.append("experiences", [*ours[4 * i : 4 * i + 4], *mine[4 * i : 4 * i + 4]]).rows
print(new, flush=True)
"""
)


def kill(process: subprocess.Popen[str]) -> list[str]:
    """Kill a process as `kill -9` does, and return what else it had said."""
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate(timeout=100)
    assert process.returncode == -signal.SIGKILL, "it was killed, it did not end"
    return rest.split()


def audit(store: Store) -> tuple[int, int, int, int]:
    """Return rows, different ids, groups, and groups that are not whole."""
    [(rows, ids, groups, broken)] = store.sql(
        "SELECT sum(n), sum(ids), count(*), count(*) FILTER (n <> 4) FROM (SELECT count(*) AS n, "
        "count(DISTINCT experience_id) AS ids FROM experiences GROUP BY group_id)"
    ).fetchall()
    return rows or 0, ids or 0, groups, broken


def test_kill_between_appends_loses_nothing_that_was_returned(store: Store) -> None:
    writer = start(APPENDS, store.uri)
    for _ in range(5):
        said(writer)
    time.sleep(0.05)  # so that the kill lands anywhere within an append
    returned = 5 + len(kill(writer))
    rows, ids, groups, broken = audit(connect(store.uri))
    assert groups in (returned, returned + 1), "the last append may have been done, but not told"
    assert (rows, ids, broken) == (4 * groups, 4 * groups, 0)
    again = connect(store.uri).append("experiences", experiences(4 * groups + 4, reward=1.0))
    assert (again.rows, again.duplicates) == (4, 4 * groups)


def test_kill_within_a_stream_leaves_nothing_of_it(store: Store) -> None:
    store.append("experiences", experiences(4, reward=1.0))
    writer = start(STREAM, store.uri)
    assert [said(writer) for _ in range(4)][-1] == "1200", "it is in the middle"
    kill(writer)
    after = connect(store.uri)
    assert audit(after) == (4, 4, 1, 0)
    assert after.append("experiences", experiences(4000, reward=1.0)).rows == 3996


def test_four_processes_lose_and_duplicate_nothing(store: Store) -> None:
    writers = [start(MINE_AND_OURS, store.uri, me) for me in range(4)]
    for writer in writers:
        assert said(writer) == "ready"
    for writer in writers:
        tell(writer)
    new = [int(writer.communicate(timeout=100)[0]) for writer in writers]
    assert [w.returncode for w in writers] == [0, 0, 0, 0]
    assert sum(new) == 200, "each row was new to one of them"
    assert audit(store) == (200, 200, 50, 0)
    assert store.append("experiences", experiences(200, reward=1.0)).duplicates == 200
