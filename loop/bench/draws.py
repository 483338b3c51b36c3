"""Figures of draws: choosing rows and reading their payload."""

from collections.abc import Iterator
from time import perf_counter

from ...store.sampling import Freshness, Sampler, Uniform
from .figure import PAYLOAD, Bench, Figure, of, timed


def draw(bench: Bench) -> Iterator[Figure]:
    """Draw 256 rows: look what is fresh, choose, and read the payload."""
    size = f"256 fresh of {bench.rows} rows of 256-512 tokens"
    sampler = Sampler(
        bench.large, strategy=Uniform(), freshness=Freshness(4), max_draws=None, seed=0
    )
    began = perf_counter()
    sampler.supply(256, 9)
    first = 1000 * (perf_counter() - began)
    workload = f"the first look at {bench.rows} rows; later ones read what is new"
    yield Figure("index", round(first, 3), "ms", None, workload)

    def one(step: int) -> None:
        drawn = sampler.draw(256, step=step, policy_version=9)
        assert drawn is not None, "there are fresh rows"
        assert sampler.read(drawn, PAYLOAD).height == 256

    yield of(timed(one, times=40, warm_up=5), "draw", 25.0, f"{size}, uniform, payload read")
    choose = timed(lambda i: sampler.draw(256, step=i, policy_version=9), times=40)
    yield of(choose, "draw_choose", None, f"{size}, uniform, without the payload")
