"""Ray clusters of several nodes on this machine, and runs on them."""

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlake.loop.config import RunConfig
from rlake.loop.run import run
from rlake.store import Store

from .tiny_models import config


@contextmanager
def starting(**head: Any) -> Iterator[Any]:
    """Start a cluster with a head node, whose processes find the tests' modules."""
    import ray
    from ray.cluster_utils import Cluster

    # Ray's 15 starves its workers on a busy machine.
    head["_system_config"] = {"worker_niceness": 0, **head.get("_system_config", {})}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lance is not fork-safe")
        cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
        sys.path.append(here := str(Path(__file__).parents[1]))
        try:
            yield cluster
        finally:
            sys.path.remove(here)
            ray.shutdown()
            cluster.shutdown()


def settings(address: str | None, **changes: Any) -> RunConfig:
    """Build the configuration of a run with two explorers on a cluster, or of one without."""
    cluster = {"address": address, "num_explorers": 2, **changes.pop("ray", {})}
    explorer = {
        "workflow": "support.ray_workflows:noting_process",
        "rewards": "support.ray_workflows:share_of_even",
        **changes.pop("explorer", {}),
    }
    schedule = {"timeout": 300, **changes.pop("schedule", {})}
    return config(explorer=explorer, ray=cluster if address else None, schedule=schedule, **changes)


def processes(store: Store) -> set[int]:
    """Return the processes that made the rows that are stored."""
    query = (
        "SELECT DISTINCT list_filter(metrics, lambda m: m.name = 'pid')[1].value FROM experiences"
    )
    return {int(pid) for (pid,) in store.sql(query).fetchall() if pid is not None}


@contextmanager
def in_background(store: Store, how: RunConfig) -> Iterator[threading.Thread]:
    """Run a configuration in a thread, wait for its end, and raise its error."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            run(store, how)
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(250)
        if failed:
            raise failed[0]
    assert not thread.is_alive(), "the run did not end"


def wait_for(ready: Callable[[], bool], thread: threading.Thread, *, seconds: float = 250) -> None:
    """Wait until something is so, while a run goes on."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert thread.is_alive(), "the run ended before"
        assert time.monotonic() < deadline
        time.sleep(0.02)
