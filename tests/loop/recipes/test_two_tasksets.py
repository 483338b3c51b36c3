"""Two tasksets with different rewards in one run: both are learned."""

from pathlib import Path

import pytest
from support.tiny_models import metric

from rlake.loop import cli
from rlake.store import Store, connect

LEAST = 0.05
"""By how much the mean reward of ten steps must rise: more than chance can do."""


def rise(store: Store, taskset: str) -> float:
    """Return by how much the mean reward of the last ten steps is above that of the first ten."""
    values = list(metric(store, f"explore/{taskset}/reward_mean").values())
    return (sum(values[-10:]) - sum(values[:10])) / 10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_of_each_taskset_rises_with_every_seed(tmp_path: Path, seed: int) -> None:
    store = connect(tmp_path / "lake")
    words = ["run", "two_tasksets", "--store", store.uri, "--set", f"seed={seed}"]
    assert cli.run_command(words) == 0
    assert all(rise(store, name) > LEAST for name in ("sums", "games"))
