"""A store on `s3://`, at a real S3 API server: exactly once, and refusals that are told."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest
from lance.file import LanceFileSession
from support.builders import experiences, task
from support.processes import said, start
from support.s3 import serving

from rlake.store import Store, branches, connect, marker
from rlake.store.errors import NotAStoreError, StoreError
from rlake.store.merge_branch import merge
from rlake.store.snapshots import restore

pytest.importorskip("boto3")
pytest.importorskip("moto.server")

MINE_AND_OURS = """
import sys
import rlake
from support.builders import experiences
store = rlake.connect(sys.argv[1])
me = int(sys.argv[2])
ours = experiences(12, reward=1.0)
mine = [e for e in experiences(60, reward=1.0)[12:] if int(e.group_id[1:]) % 4 == me]
print("ready", flush=True)
sys.stdin.readline()
new = 0
for i in range(3):
    new += store.append("experiences", [*ours[4 * i : 4 * i + 4], *mine[4 * i : 4 * i + 4]]).rows
print(new, flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """A server on loopback with a bucket `lake`; its storage options."""
    with serving() as options:
        yield options


@pytest.fixture
def lake(server: dict[str, str], request: pytest.FixtureRequest) -> Store:
    return connect(f"s3://lake/{request.node.name}", storage_options=server)


def environment(server: dict[str, str]) -> dict[str, str]:
    """The storage options as the environment gives them."""
    return {
        "AWS_ENDPOINT_URL": server["endpoint"],
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }


def test_a_store_on_s3_is_made_filled_read_named_and_kept_small(
    lake: Store, server: dict[str, str]
) -> None:
    assert lake.append("experiences", experiences(8, reward=1.0)).rows == 8
    assert lake.append("experiences", experiences(12, reward=1.0)).duplicates == 8
    lake.snapshot("before")
    lake.append_stream("experiences", [experiences(20, reward=1.0)[12:]])
    again = connect(lake.uri, create=False, storage_options=server)
    assert again.sql("SELECT count(*), sum(reward) FROM experiences").fetchall() == [(20, 20.0)]
    assert again.at("before").count("experiences") == 12
    again.maintain()
    assert len(again.dataset("experiences").get_fragments()) == 1
    assert lake.append("experiences", experiences(20, reward=1.0)).duplicates == 20


@pytest.mark.slow
def test_a_store_on_s3_goes_two_ways_and_back(lake: Store, server: dict[str, str]) -> None:
    lake.append("experiences", experiences(8))
    lake.snapshot("one")
    trial = lake.branch("trial")
    trial.append("tasks", [task(0)])
    trial.append("scores", [{"experience_id": "g000/00", "scorer": "s", "scorer_version": "1"}])
    again = connect(f"{lake.uri}@trial", storage_options=server)
    assert (again.count("tasks"), again.scan("experiences").collect().height) == (1, 8)
    assert merge(lake, "trial")["scores"].rows == 1
    undo = restore(lake, "one").undo
    assert (lake.count("scores"), lake.at(undo).count("scores")) == (0, 1)
    branches.drop(lake, "trial")
    assert lake.branch("trial").count("tasks") == 0


@pytest.mark.slow
def test_four_processes_on_s3_lose_and_duplicate_nothing(
    lake: Store, server: dict[str, str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(server).items():
            patch.setenv(name, value)
        writers = [start(MINE_AND_OURS, lake.uri, me) for me in range(4)]
    for writer in writers:
        assert said(writer) == "ready"
    new = [int(writer.communicate("go\n", timeout=100)[0]) for writer in writers]
    told = lake.sql("SELECT count(*), count(DISTINCT experience_id) FROM experiences").fetchall()
    assert (sum(new), told) == (60, [(60, 60)])


@pytest.mark.slow
def test_the_command_line_reaches_s3_by_the_environment(
    lake: Store, server: dict[str, str]
) -> None:
    lake.append("tasks", [task(3)])
    code = "from rlake.loop.cli import main; main()"
    query = ["sql", "SELECT answer FROM tasks", "--json", "--store", lake.uri]
    done = subprocess.run(
        [sys.executable, "-c", code, *query],
        env=os.environ | environment(server),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"answer": "6"}]


def test_a_place_without_a_store_is_not_made_by_looking(server: dict[str, str]) -> None:
    with pytest.raises(NotAStoreError, match="no store at `s3://lake/nothing`"):
        connect("s3://lake/nothing", create=False, storage_options=server)


def test_a_table_lost_on_s3_is_not_made_anew_and_one_half_made_is(
    lake: Store, server: dict[str, str]
) -> None:
    table = LanceFileSession(f"{lake.uri}/experiences.lance", storage_options=server)
    for file in table.list():
        table.delete_file(file)
    for create in (True, False):
        with pytest.raises(StoreError, match="has lost table `experiences`"):
            connect(lake.uri, create=create, storage_options=server)
    assert not table.list()
    marker.put(lake)
    assert connect(lake.uri, storage_options=server).count("experiences") == 0
    assert not marker.is_there(lake)


def test_a_bucket_that_is_not_there_is_named(server: dict[str, str]) -> None:
    with pytest.raises(StoreError, match=r"at `s3://nobody/x`: the bucket does not exist"):
        connect("s3://nobody/x", storage_options=server)


def test_credentials_that_are_refused_are_told_promptly(
    lake: Store, server: dict[str, str]
) -> None:
    def check(after: str) -> None:
        """Let the server look at credentials, or not."""
        address = f"{server['endpoint']}/moto-api/reset-auth"
        headers = {"Content-Type": "text/plain"}
        urlopen(Request(address, data=after.encode(), headers=headers)).close()

    check("0")
    try:
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"the credentials were refused \(InvalidAccessKeyId"):
            connect(lake.uri, storage_options=server)
        with pytest.raises(StoreError, match="cannot write to `tasks`: the credentials were"):
            lake.append("tasks", [task(0)])
        assert time.monotonic() - began < 30
    finally:
        check("inf")
    assert lake.append("tasks", [task(0)]).rows == 1


def test_an_address_that_does_not_answer_is_said_to_be_so(server: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    options = server | {"endpoint": f"http://127.0.0.1:{port}"}
    with pytest.raises(StoreError, match="the address does not answer; check the network"):
        connect("s3://lake/x", storage_options=options | {"client_max_retries": "0"})
