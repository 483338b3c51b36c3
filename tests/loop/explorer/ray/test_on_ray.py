"""Explorers and a trainer on a Ray cluster of two nodes, and what becomes of them when some die."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.audit import audit
from support.images import shown
from support.ray_clusters import in_background, processes, settings, starting, wait_for
from support.s3 import serving
from support.tiny_models import table
from support.vision import TINY, noise

import rlake
from rlake.loop.explorer.ray.scale_up import join
from rlake.loop.run import run
from rlake.loop.runs.placement_group import reserved
from rlake.loop.runs.ray import connected
from rlake.store import Store, Task
from rlake.store.errors import JobError
from rlake.store.media import put_images

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of two nodes on this machine; one of them has what the trainer asks for."""
    with starting(num_cpus=4) as cluster:
        cluster.add_node(num_cpus=4, resources={"training": 1})
        yield str(cluster.address)


def tokens(store: Store) -> list[tuple[object, ...]]:
    query = (
        "SELECT regexp_replace(experience_id, '-[0-9a-f]{8}/', '/'), token_ids, policy_version "
        "FROM experiences ORDER BY 1"
    )
    return store.sql(query).fetchall()


def test_a_connection_lasts_until_the_last_who_uses_it_leaves(address: str):
    cluster = settings(address).ray
    assert cluster is not None
    one = connected(cluster)
    before = signal.signal(signal.SIGTERM, at_the_end := lambda number, frame: None)
    one.__enter__()
    assert signal.signal(signal.SIGTERM, before) is at_the_end, "Ray's handler is not left there"
    with connected(cluster):
        one.__exit__(None, None, None)  # who made it leaves first
        assert ray.is_initialized()
    assert not ray.is_initialized()


@pytest.mark.parametrize("weights", ["store", "memory"])
def test_two_explorers_make_what_one_would_have_made(address: str, tmp_path: Path, weights: str):
    here, there = (rlake.connect(tmp_path / name) for name in ("here", "there"))
    evaluate = {"every_steps": 2, "sampling": {"temperature": 0, "max_tokens": 3}}
    run(here, settings(None, evaluate=evaluate))
    run(there, settings(address, evaluate=evaluate, schedule={"weight_transport": weights}))
    assert tokens(there) == tokens(here)
    measured = "experiences WHERE purpose = 'eval'"
    assert set(table(there, measured)["policy_version"]) == {0, 2, 3}
    losses = [table(s, "metrics").filter(name="train/loss")["value"] for s in (here, there)]
    assert losses[1].to_list() == pytest.approx(losses[0].to_list(), abs=1e-4)
    assert len(processes(there)) == 2
    assert audit(there, []) == {name: [] for name in audit(there, [])}


def test_an_explorer_reads_images_from_the_store_as_one_in_the_run_does(
    address: str, tmp_path: Path
):
    here, there = (rlake.connect(tmp_path / name) for name in ("here", "there"))
    how = {"model": TINY, "tasks": None, "trainer": {"steps": 1}}
    for store, where, cluster in (
        (here, None, {}),
        (there, address, {"ray": {"num_explorers": 1}}),
    ):
        ids = put_images(store, [noise(16, 16 + 8 * i, seed=i) for i in range(2)])
        store.append("tasks", [Task(messages=shown(one, "r="), answer="2") for one in ids])
        run(store, settings(where, **how, **cluster))
    assert tokens(there) == tokens(here)
    assert table(there, "experiences")["drop_reason"].is_null().all()
    measured = [table(s, "metrics").filter(name="train/loss")["value"] for s in (here, there)]
    assert measured[1].to_list() == pytest.approx(measured[0].to_list(), abs=1e-4)


def test_a_run_goes_on_when_an_explorer_is_killed_and_takes_in_another(
    address: str, store: Store, tmp_path: Path
):
    opens = tmp_path / "both are told"
    how = settings(
        address,
        explorer={"workflow": {"support.ray_workflows:noting_process": {"opens": str(opens)}}},
        ray={"trainer": {"resources": {"training": 1}}},
        schedule={"preset": "asynchronous", "weight_transport": "broadcast"},
        trainer={"steps": 40, "batch_size": 4, "learning_rate": 2e-2, "checkpoint_every": 10},
    )
    with in_background(store, how) as working:
        wait_for(lambda: len(processes(store)) == 2, working)
        acknowledged = table(store, "experiences")["experience_id"].to_list()
        before = processes(store)
        os.kill(min(before), signal.SIGKILL)
        assert join(how, explorers=1) in (2, 3), "whether the killed one is there again or not yet"
        wait_for(lambda: join(how, explorers=0) == 3, working)
        opens.touch()
    found = audit(store, acknowledged)
    assert (found["lost"], found["duplicated"], found["untrue"]) == ([], [], [])
    assert len(processes(store) - before) == 2, "one was started again, and one joined"
    groups = table(store, "experiences").group_by("group_id").len()["len"]
    assert set(groups) == {3}
    drawn = table(store, "draws")
    assert drawn["step"].max() == 40
    assert max(drawn["lag"].drop_nulls().to_list()) <= how.schedule.lag
    policies = table(store, "policies")
    assert set(policies["transport"]) == {"broadcast"}
    assert policies["address"].str.contains(r":\d+$").all()
    segments = store.sql(
        "SELECT count(*) FROM experiences WHERE segments[1].policy_version > 0"
    ).fetchall()
    assert segments[0][0] > 40


def test_explorers_for_which_there_is_no_room_end_the_run(address: str, store: Store):
    how = settings(address, ray={"resources": {"moonlight": 1}, "startup_timeout": 2})
    told = (
        r"`demo` was not placed within .* 2 s: SPREAD of 2 x \(CPU 1, moonlight 1\), on nodes with "
        r"\(CPU 4\), \(CPU 4, training 1\), of which CPU [1-8], training 1 is free; add nodes"
    )
    with pytest.raises(JobError, match=told):
        run(store, how)
    assert store.count("job_events") == 0, "no job began, so the run's name is free"
    with pytest.raises(JobError, match="run `demo` is not exploring on the cluster"):
        join(how, explorers=1)


def test_processes_are_placed_together_by_the_strategy(address: str, store: Store):
    few = {"num_explorers": 1, "trainer": {}, "startup_timeout": 60}
    apart = settings(address, ray={**few, "strategy": "STRICT_SPREAD"})
    packed = settings(address, ray={**few, "strategy": "STRICT_PACK", "cpus": 2})
    three = {"distributed": {"world_size": 2, "launcher": "ray"}}
    for how, nodes in [(apart, 2), (packed, 1)]:
        assert how.ray is not None
        with connected(how.ray), reserved(how, trainer=True) as place:
            found = ray.util.placement_group_table(place.group)
            assert len(set(found["bundles_to_node_id"].values())) == nodes
            assert place.of_explorer(how.ray, 0)["num_cpus"] == how.ray.cpus
            with reserved(how, trainer=False) as same:
                assert same.group == place.group
            assert place.of_explorer(how.ray, 1)["scheduling_strategy"] == "SPREAD"
    asked = {**few, "strategy": "STRICT_SPREAD", "startup_timeout": 2}
    with pytest.raises(JobError, match=r"STRICT_SPREAD of 3 x \(CPU 1\), on nodes with"):
        run(store, settings(address, ray=asked, trainer=three))
    assert store.count("job_events") == 0
    run(store, settings(address, ray={"trainer": {"cpus": 3}}, trainer={"steps": 2, **three}))
    assert table(store, "draws")["step"].max() == 2


def test_a_run_on_a_store_on_s3_gets_another_explorer_while_its_trainer_waits(
    address: str, tmp_path: Path
):
    pytest.importorskip("moto.server")
    opens = tmp_path / "there are two"
    with serving() as options:
        store = rlake.connect("s3://lake/shared", storage_options=options)
        how = settings(
            address,
            output=str(tmp_path / "runs"),
            explorer={"workflow": {"support.ray_workflows:noting_process": {"opens": str(opens)}}},
            ray={
                "num_explorers": 1,
                "max_explorers": 2,
                "scale_interval": 1,
                "trainer": {"resources": {"training": 1}},
            },
            schedule={"preset": "asynchronous"},
            trainer={"steps": 10},
        )
        with in_background(store, how) as working:
            # Answers of weights that learned a little wait, and the trainer waits for them.
            wait_for(lambda: store.count("draws") >= 10, working)
            wait_for(lambda: join(how, explorers=0) == 2, working)
            opens.touch()
        found = audit(store, [])
        assert (found["lost"], found["duplicated"], found["untrue"]) == ([], [], [])
        why = store.sql(
            "SELECT name, max(value), sum(greatest(value, 0)) FROM metrics_current "
            "WHERE name LIKE 'explore/scale/%' OR name = 'explore/explorers' GROUP BY 1 ORDER BY 1"
        ).fetchall()
        assert why[0][:2] == ("explore/explorers", 2)
        assert why[1][0] == "explore/scale/change"
        assert why[1][2] >= 1
        assert why[2][1] > 0.5, "the trainer waited most of the time"
