"""What the tests of draws share: rows with versions, and the ids of what was drawn."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from support.builders import experiences

from rlake.store import Experience, Store, connect
from rlake.store.replay import Draw, Fifo, Mixture, Prioritized, Sampler, Uniform

STRATEGIES = [
    Fifo(),
    Uniform(),
    Uniform(replacement=True),
    Prioritized("1 + rollout_index"),
    Prioritized("1.0 / (1 + age)"),
]


@contextmanager
def a_store(empty: Path) -> Iterator[Store]:
    """A store of its own for each example of a property."""
    with TemporaryDirectory() as folder:
        shutil.copytree(empty, Path(folder) / "store")
        yield connect(Path(folder) / "store")


def versioned(versions: Sequence[int | None], *, group_size: int = 1) -> list[Experience]:
    """Make a group for each policy version."""
    made = experiences(len(versions) * group_size, group_size=group_size)
    return [replace(e, policy_version=versions[i // group_size]) for i, e in enumerate(made)]


def ids(sampler: Sampler | Mixture, draw: Draw | None) -> list[str]:
    """The rows of a draw, in order."""
    assert draw is not None
    return sampler.read(draw, ["experience_id"])["experience_id"].to_list()


def draws(
    sampler: Sampler | Mixture, n: int, steps: Iterable[int], *, version: int = 0, **bounds: Any
) -> list[list[str]]:
    """The rows of some steps."""
    return [
        ids(sampler, sampler.draw(n, step=s, policy_version=version, **bounds)) for s in steps
    ]  # fmt: skip


def names(n: int, *, group_size: int = 4) -> list[str]:
    """The ids of the first rows that `experiences` makes."""
    return [str(e.experience_id) for e in experiences(n, group_size=group_size)]


def flat(steps: Iterable[list[str]]) -> list[str]:
    return [name for step in steps for name in step]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic; all expected counts should be 5 or more."""
    assert expected.min() >= 5, "the test would mean nothing"
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(freedom: int, z: float = 3.719) -> float:
    """The value that chance exceeds once in 10,000 times (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + z * sqrt(spread)) ** 3
