"""Squares in pictures are counted by a policy that sees them, and by none that is shown others."""

from pathlib import Path

import pytest

from rlake.loop import cli
from rlake.store import Store, connect

RISE = 0.3
"""By how much GRPO must raise the accuracy of its warm start."""
CHANCE = 0.25
"""Counts are uniform from 0 to 3."""


def accuracy(store: Store, stage: str, taskset: str) -> float:
    """The greedy accuracy of a stage's last weights on pictures that were never trained on."""
    query = (
        "SELECT value FROM metrics_current WHERE job = 'evaluate' "
        f"AND run_id = 'vision_squares.{stage}' AND name = 'eval/{taskset}/accuracy'"
    )
    [(found,)] = store.sql(query).fetchall()
    return float(found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_counting_is_learned_from_its_warm_start_and_not_blind(tmp_path: Path) -> None:
    store = connect(tmp_path / "lake")
    assert cli.run_command(["run", "vision_squares", "--store", store.uri]) == 0
    before = accuracy(store, "warm_start", "squares")
    after = accuracy(store, "learn", "squares")
    assert after >= before + RISE
    # of 100 tasks, chance is within 0.13 in 99 of 100 cases
    shuffled = accuracy(store, "learn", "squares_shuffled")
    assert shuffled == pytest.approx(CHANCE, abs=0.15)
    # the shuffled tasks and all rollouts show the same pictures, which are stored once
    shown = "SELECT count(DISTINCT one) FROM (SELECT unnest(media_ids(messages)) AS one FROM tasks)"
    assert store.sql(shown).fetchall() == [(store.count("media"),)]
