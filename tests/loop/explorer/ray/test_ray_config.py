"""What a configuration says of a cluster, checked before any work."""

import asyncio
from pathlib import Path

import pytest
from support.tiny_models import config

from rlake.loop.config import RayConfig
from rlake.loop.explorer.ray.actor import RolloutActor, WorkerSpec, bounded
from rlake.loop.explorer.ray.pool import share
from rlake.loop.explorer.ray.scale_up import join
from rlake.store import Experience
from rlake.store.errors import ConfigError, JobError


def test_a_few_lines_place_explorers_and_trainer():
    few = {"num_explorers": 3, "gpus": 1, "trainer": {"gpus": 4, "resources": {"fast_disk": 1}}}
    cluster = config(ray=few).ray
    assert isinstance(cluster, RayConfig)
    assert (cluster.num_explorers, cluster.cpus, cluster.gpus) == (3, 1.0, 1.0)
    assert cluster.trainer is not None
    assert cluster.trainer.resources == {"fast_disk": 1.0}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ray": {"num_explorers": 0}}, "ray.num_explorers"),
        ({"ray": {"nodes": 2}}, "ray.nodes"),
        (
            {"ray": {"trainer": {}}, "schedule": {"weight_transport": "memory"}},
            "schedule.weight_transport is memory",
        ),
        ({"schedule": {"weight_transport": "pigeon"}}, "schedule.weight_transport"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(changes: dict[str, object], told: str):
    with pytest.raises(ConfigError, match=told):
        config(**changes)


def test_tries_at_once_are_shared_by_all_explorers():
    assert share(9, 4) == 2
    with pytest.raises(
        ConfigError, match=r"max_concurrent_rollouts` is 2, and there are 3 explorers"
    ):
        share(2, 3)


def test_a_run_without_a_cluster_takes_no_explorers():
    with pytest.raises(ConfigError, match="has no `ray` section"):
        join(config(), explorers=1)


def test_an_explorer_on_a_node_without_the_folder_of_the_model_names_output(tmp_path: Path):
    spec = WorkerSpec(
        config=config(), max_concurrent_rollouts=None, paths=(), store=str(tmp_path / "lost")
    )
    with pytest.raises(JobError, match=r"nowhere` is not on node .*; set `output` to a"):
        asyncio.run(RolloutActor(spec).start(str(tmp_path / "nowhere")))
    # a model of text needs no store there, one that reads images does
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    with pytest.raises(JobError, match=r"lost` cannot be opened on node .*; put the store"):
        asyncio.run(RolloutActor(spec).start(str(tmp_path)))


def test_of_a_group_that_is_too_large_the_largest_row_becomes_one_that_says_so():
    small = Experience(task_id="t", group_id="g", experience_id="a", response_text="x")
    large = Experience(task_id="t", group_id="g", experience_id="b", response_text="x" * 100_000)
    assert bounded([small, large], 1 << 20) == [small, large]
    [kept, replaced] = bounded([small, large], 10_000)
    assert kept is small
    assert (replaced.experience_id, replaced.response_text) == ("b", None)
    assert "a group may have 10000: raise `ray.max_group_bytes`" in str(replaced.drop_reason)


def test_a_row_that_cannot_travel_becomes_one_that_says_so():
    good = Experience(task_id="t", group_id="g", experience_id="a", response_text="x")
    bad = Experience(task_id="t", group_id="g", experience_id="b", metadata={"then": lambda: None})
    [kept, replaced] = bounded([good, bad], 10_000)
    assert kept is good
    assert (replaced.experience_id, replaced.metadata) == ("b", None)
    assert "the workflow's row does not fit: " in str(replaced.drop_reason)
