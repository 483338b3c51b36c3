"""A new algorithm is one file: nothing else is edited, and it trains, is described and is held to
the laws like those that are packaged."""

import importlib
import sys
from pathlib import Path

import pytest

from rlake.loop import algorithms
from rlake.loop.algorithms import names, resolve
from rlake.loop.cli.algorithms import describe
from rlake.loop.config import load
from rlake.loop.run import run
from rlake.store import Store

FILE = '''"""Sign gradient, arXiv:0000.00000: only whether a try was above its group counts.

Metrics: `train/up_fraction` is the share of trained tokens whose sequence was above.
"""

from dataclasses import dataclass

from torch import Tensor

from {package}operators import Operator, group_centered
from {objectives} import Count, PolicyGradient
from {training} import Batch


@dataclass(frozen=True, kw_only=True)
class Sign(PolicyGradient):
    """Policy gradient with advantages of one size."""

    size: Count = 1
    """What all advantages are."""

    def advantage(self) -> Operator:
        """Reward less the mean of its group."""
        return group_centered()

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-likelihood by sign, negated."""
        sign_BT = batch.advantage_BT.sign()
        up = batch.token_mean((sign_BT > 0).to(logprobs_BT.dtype))
        return -self.size * sign_BT * logprobs_BT, {{"up_fraction": up}}
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside the package from which modules can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


def test_a_file_outside_the_package_trains_as_it_is(mine: Path, store: Store) -> None:
    outside = {"objectives": "rlake.loop.losses", "training": "rlake.loop.losses.batch"}
    (mine / "sign_of_mine.py").write_text(FILE.format(package="rlake.", **outside))
    config = mine / "c.yaml"
    config.write_text(
        "{extends: grpo_digits, name: mine, algorithm: {'sign_of_mine:Sign': {size: 2}},"
        " trainer: {steps: 4, batch_size: 6}}"
    )
    run(store, load(config))
    [(steps, least, most)] = store.sql(
        "SELECT count(*), min(value), max(value) FROM metrics WHERE name = 'train/up_fraction'"
    ).fetchall()
    assert steps == 4
    assert 0 < least <= most < 1
    digests = store.sql("SELECT DISTINCT digest FROM policies WHERE run_id = 'mine'").fetchall()
    assert len(digests) == 5
    found = describe("sign_of_mine:Sign")
    assert (found.paper, found.group_size) == ("0000.00000", 8)
    assert found.metrics["up_fraction"].startswith("the share of trained tokens")


def test_a_file_in_the_folder_of_algorithms_is_found_by_its_name(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = {"objectives": "..losses", "training": "..losses.batch"}
    (mine / "sign.py").write_text(FILE.format(package="...", **inside))
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(mine)])
    try:
        assert "sign" in names()
        assert type(resolve({"sign": {"size": 3}})).__name__ == "Sign"
    finally:
        sys.modules.pop("rlake.loop.algorithms.sign", None)
    monkeypatch.undo()
    assert "sign" not in names()


def test_tries_at_a_task_are_as_many_as_the_algorithm_says_unless_the_run_says_more(
    store: Store,
) -> None:
    for name, overrides, tries in (
        ("of_algorithm", ["algorithm=rloo"], 4),
        ("of_run", ["algorithm={grpo: {group_size: 3}}", "explorer.group_size=5"], 5),
    ):
        short = [f"name={name}", "trainer.steps=1", "trainer.batch_size=2"]
        run(store, load("grpo_digits", [*short, *overrides]))
        counted = f"SELECT count(*) FROM experiences WHERE run_id = '{name}' GROUP BY group_id"
        assert set(store.sql(counted).fetchall()) == {(tries,)}
