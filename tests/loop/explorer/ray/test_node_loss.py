"""What becomes of a run on Ray when a whole node of its cluster is lost."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.audit import audit
from support.ray_clusters import in_background, processes, settings, starting, wait_for
from support.tiny_models import table

from rlake.loop.explorer.ray.scale_up import join
from rlake.store import Store

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A cluster whose head has room for one explorer; the death of a node is noticed in seconds."""
    # A raylet that was killed fails all checks at once; one that is only slow has 10 s for each.
    checks = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000}
    with starting(num_cpus=1, _system_config=checks) as cluster:
        yield cluster


def attempts(store: Store) -> list[tuple[int, int]]:
    """Return the attempts of the trainer, with their first steps."""
    query = "SELECT DISTINCT attempt, start_step FROM job_events WHERE job = 'train' ORDER BY 1"
    return store.sql(query).fetchall()


def test_a_run_goes_on_elsewhere_when_the_node_of_its_trainer_and_an_explorer_is_lost(
    cluster: Any, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    doomed = cluster.add_node(num_cpus=2, resources={"training": 1})
    opens = tmp_path / "the node is lost"
    how = settings(
        str(cluster.address),
        explorer={"workflow": {"support.ray_workflows:noting_process": {"opens": str(opens)}}},
        ray={"trainer": {"resources": {"training": 1}}},
        schedule={"preset": "asynchronous", "weight_transport": "broadcast"},
        trainer={"steps": 16, "batch_size": 4, "checkpoint_every": 2},
    )
    with in_background(store, how) as working, caplog.at_level(logging.WARNING):
        wait_for(lambda: len(processes(store)) == 2, working)
        wait_for(lambda: 5 in table(store, "draws")["step"], working)
        acknowledged = table(store, "experiences")["experience_id"].to_list()
        before = processes(store)
        cluster.add_node(num_cpus=2, resources={"training": 1})
        cluster.remove_node(doomed, allow_graceful=False)
        wait_for(lambda: len(attempts(store)) == 2, working)
        wait_for(lambda: join(how, explorers=0) == 2, working)
        opens.touch()
    found = audit(store, acknowledged)
    assert (found["lost"], found["duplicated"], found["untrue"]) == ([], [], [])
    assert len(processes(store) - before) == 1, "the explorer that was lost has a new process"
    groups = table(store, "experiences").group_by("group_id").len()["len"]
    assert set(groups) == {3}
    [(_, first), (_, again)] = attempts(store)
    assert first == 1
    assert again in range(3, 16, 2), "it resumed from a checkpoint"
    drawn = store.sql("SELECT step, count(*) FROM draws_current GROUP BY 1 ORDER BY 1").fetchall()
    assert drawn == [(step, drawn[0][1]) for step in range(1, 17)]
    assert "the trainer's process died" in caplog.text
    assert "it is started again, from its newest checkpoint" in caplog.text


@pytest.mark.long
def test_a_trainer_of_two_processes_is_started_again_when_the_node_of_one_is_lost(
    cluster: Any, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    nodes = [cluster.add_node(num_cpus=1, resources={"training": 1}) for _ in range(2)]
    opens = tmp_path / "a process is lost"
    how = settings(
        str(cluster.address),
        explorer={"workflow": {"support.ray_workflows:noting_process": {"opens": str(opens)}}},
        ray={"trainer": {"resources": {"training": 1}}, "num_explorers": 1},
        schedule={"preset": "asynchronous"},
        trainer={
            "steps": 16,
            "batch_size": 4,
            "checkpoint_every": 2,
            "distributed": {"world_size": 2, "launcher": "ray"},
        },
    )
    with in_background(store, how) as working, caplog.at_level(logging.WARNING):
        wait_for(lambda: 5 in table(store, "draws")["step"], working)
        acknowledged = table(store, "experiences")["experience_id"].to_list()
        group = ray.util.get_placement_group("run/demo")
        of_bundles = ray.util.placement_group_table(group)["bundles_to_node_id"]
        [doomed] = [node for node in nodes if node.node_id == of_bundles[1]]
        cluster.add_node(num_cpus=1, resources={"training": 1})
        cluster.remove_node(doomed, allow_graceful=False)
        wait_for(lambda: len(attempts(store)) == 2, working)
        opens.touch()
    found = audit(store, acknowledged)
    assert (found["lost"], found["duplicated"], found["untrue"]) == ([], [], [])
    [_, (_, again)] = attempts(store)
    assert again in range(3, 16, 2), "it resumed from a checkpoint"
    drawn = store.sql("SELECT step, count(*) FROM draws_current GROUP BY 1 ORDER BY 1").fetchall()
    assert drawn == [(step, drawn[0][1]) for step in range(1, 17)]
    assert "it is started again, from its newest checkpoint" in caplog.text


@pytest.mark.long
def test_a_node_that_is_lost_while_weights_are_sent_to_its_explorer_does_not_stop_the_others(
    cluster: Any, store: Store, caplog: pytest.LogCaptureFixture
):
    doomed = cluster.add_node(num_cpus=1)
    how = settings(
        str(cluster.address),
        schedule={"preset": "asynchronous", "weight_transport": "broadcast"},
        trainer={"steps": 24, "batch_size": 4},
    )
    with in_background(store, how) as working, caplog.at_level(logging.WARNING):
        wait_for(lambda: len(processes(store)) == 2, working)
        acknowledged = table(store, "experiences")["experience_id"].to_list()
        raylet = doomed.all_processes["raylet"][0].process.pid
        [pid] = [pid for pid in processes(store) if parent(pid) == raylet]
        os.kill(pid, signal.SIGSTOP)  # it receives no more, whatever is sent to it
        newest = max(table(store, "policies")["policy_version"])
        wait_for(lambda: max(table(store, "policies")["policy_version"]) >= newest + 2, working)
        cluster.remove_node(doomed, allow_graceful=False)
    found = audit(store, acknowledged)
    assert (found["lost"], found["duplicated"], found["untrue"]) == ([], [], [])
    assert table(store, "draws")["step"].max() == 24
    later = store.sql(f"SELECT count(*) FROM experiences WHERE policy_version > {newest + 2}")
    assert later.fetchall()[0][0] > 0, "the other explorer got the weights that followed"


def parent(pid: int) -> int:
    """Return the process that started another one; of Ray's, that is the raylet of its node."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
