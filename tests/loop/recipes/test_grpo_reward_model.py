"""A policy learns from a reward model that was trained in the same store."""

from pathlib import Path

import pytest

from rlake.loop import cli
from rlake.store import connect

LEAST = 0.3
"""By how much the true reward of tasks never trained on must rise; an untrained policy has 0.02."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_true_reward_rises_where_only_a_reward_model_scores(tmp_path: Path) -> None:
    store = connect(tmp_path / "lake")
    assert cli.run_command(["run", "grpo_reward_model", "--store", store.uri]) == 0
    values = store.sql(
        "SELECT value FROM metrics_current WHERE run_id = 'grpo_reward_model.learn' "
        "AND name = 'eval/reward_mean' ORDER BY step"
    ).fetchall()
    assert values[-1][0] - values[0][0] > LEAST
    parts = store.sql(
        "SELECT DISTINCT unnest(map_keys(map_from_entries(rewards))) FROM experiences "
        "WHERE run_id = 'grpo_reward_model.learn' AND purpose = 'train' ORDER BY ALL"
    ).fetchall()
    assert parts == [("overlong",), ("reward_model",)]
    accuracy = store.sql(
        "SELECT max(value) FROM metrics_current WHERE run_id = 'grpo_reward_model.scorer' "
        "AND name = 'eval/accuracy'"
    ).fetchall()
    assert accuracy[0][0] > 0.8
