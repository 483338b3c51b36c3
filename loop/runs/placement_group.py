"""The placement group of a run on Ray: a bundle for each process, placed all at once or not."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...store.errors import JobError
from ..config import PlaceConfig, RunConfig
from .ray import connected, options, ray_module

is_restarted = threading.Event()
"""Set in the process of a trainer that Ray placed: if it dies, its run starts it again."""


@dataclass(frozen=True)
class Reservation:
    """The bundles that a run has: those of the trainer's processes, then those of explorers."""

    group: Any
    num_explorers: int

    def of_trainer(self, place: PlaceConfig, rank: int = 0) -> dict[str, Any]:
        """Return Ray's options for a process of the trainer."""
        return {**options(place), "scheduling_strategy": in_bundle(self.group, rank)}

    def of_explorer(self, place: PlaceConfig, index: int) -> dict[str, Any]:
        """Return Ray's options for an explorer; those without a bundle go where there is room."""
        if index >= self.num_explorers:
            return {**options(place), "scheduling_strategy": "SPREAD"}
        bundle = self.group.bundle_count - self.num_explorers + index
        return {**options(place), "scheduling_strategy": in_bundle(self.group, bundle)}


def in_bundle(group: Any, index: int) -> Any:
    """Return the scheduling strategy of what runs in a bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


@contextmanager
def reserved(config: RunConfig, *, trainer: bool) -> Iterator[Reservation]:
    """Place the bundles of a run, or use those that this process has placed for it.

    With `trainer`, those of the trainer's processes too, if the run places them. The connection to
    the cluster must be open. Raises JobError if they are not placed in time.
    """
    cluster, ray = config.ray, ray_module()
    assert cluster is not None, "a run on Ray has its section in the configuration"
    name = f"run/{config.name}"
    try:
        yield Reservation(ray.util.get_placement_group(name), cluster.num_explorers)
        return
    except ValueError:
        pass  # Ray's answer for a name that this process has not given
    places = [cluster] * cluster.num_explorers
    if trainer and cluster.trainer is not None:
        parallel = config.trainer.distributed
        processes = (parallel.world_size or 1) if parallel.launcher == "ray" else 1
        places = [cluster.trainer] * processes + places
    bundles = [bundle(place) for place in places]
    group = ray.util.placement_group(bundles, strategy=cluster.strategy, name=name)
    try:
        if not ray.wait([group.ready()], timeout=cluster.startup_timeout)[0]:
            raise JobError(
                f"run `{config.name}` was not placed within `ray.startup_timeout`, "
                f"{cluster.startup_timeout:g} s: {cluster.strategy} of "
                f"{_counted(bundles)}, on nodes with {_nodes()}; add nodes, ask for less, or "
                "change `ray.strategy`"
            )
        yield Reservation(group, cluster.num_explorers)
    finally:
        if ray.is_initialized():  # else the group has ended with the connection
            ray.util.remove_placement_group(group)


@contextmanager
def placed(config: RunConfig) -> Iterator[None]:
    """Connect to a run's cluster, and place its bundles, those of the trainer included."""
    assert config.ray is not None, "a run on Ray has its section in the configuration"
    with connected(config.ray), reserved(config, trainer=True):
        yield


def bundle(place: PlaceConfig) -> dict[str, float]:
    """Return the resources of a process as a bundle of a placement group."""
    asked = {"CPU": place.cpus, "GPU": place.gpus, **place.resources}
    # Ray refuses a bundle of nothing, and each node has a byte.
    return {name: value for name, value in asked.items() if value} or {"memory": 1}


def _counted(bundles: list[dict[str, float]]) -> str:
    counts = Counter(_text(one) for one in bundles)
    return ", ".join(f"{count} x ({text})" for text, count in counts.items())


def _nodes() -> str:
    ray = ray_module()
    there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = sorted(f"({_text(resources) or 'nothing'})" for resources in there)
    free = _text(ray.available_resources())
    return f"{', '.join(nodes) or 'nothing'}, of which {free or 'nothing'} is free"


def _text(resources: Mapping[str, float]) -> str:
    kept = {
        name: value
        for name, value in sorted(resources.items())
        # Ray's own: memory in bytes, nodes by address, and the parts of placement groups
        if "memory" not in name and "node:" not in name and "_group_" not in name
    }
    return ", ".join(f"{name} {value:g}" for name, value in kept.items())
