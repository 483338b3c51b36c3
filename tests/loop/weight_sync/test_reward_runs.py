"""A reward model that a run trained scores the rollouts of another, and stored rows."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.preferences import prefer
from support.tiny_models import SUMS, config, offline, table

from rlake.loop import cli
from rlake.loop.config import RunConfig
from rlake.loop.evaluation.evaluate import evaluate
from rlake.loop.run import run
from rlake.operators.rewards import reward_model
from rlake.store import Experience, Store, Task
from rlake.store.errors import ConfigError, JobError, NotFoundError, OperatorError

BY_RUN = {"reward_model": {"run": "scorer"}}


def train_scorer(store: Store) -> None:
    """Train a reward model for two steps."""
    trainer = {"batch_size": 2, "learning_rate": 1e-1, "max_uses": 1}
    run(store, offline(name="scorer", algorithm="reward_model", trainer=trainer))


@pytest.fixture
def scored(store: Store) -> Store:
    """Return a store with a reward model in the run `scorer`."""
    prefer(store, 4)
    train_scorer(store)
    return store


def online(**changes: Any) -> RunConfig:
    explorer = {"rewards": BY_RUN} | changes.pop("explorer", {})
    return config(trainer={"steps": 2}, explorer=explorer, **changes)


def recorded(store: Store, job: str = "explore") -> dict[str, Any]:
    rows = table(store, f"job_events WHERE run_id = 'demo' AND job = '{job}'", "config")
    return json.loads(rows["config"][-1])


def test_rollouts_of_a_run_get_the_scores_of_the_model_that_is_recorded(scored: Store) -> None:
    run(scored, online())
    kept = recorded(scored)["explorer"]["rewards"]["reward_model"]
    [(version, digest, folder)] = scored.sql(
        "SELECT policy_version, digest, path FROM policies_current WHERE run_id = 'scorer' "
        "ORDER BY policy_version DESC LIMIT 1"
    ).fetchall()
    assert kept == {"run": "scorer", "version": version, "digest": digest, "path": None}
    rows = [Experience.from_row(row) for row in scored.scan("experiences").collect().to_dicts()]
    rows = [row for row in rows if row.run_id == "demo"]
    assert scored.runs_folder is not None
    path = str(scored.runs_folder / "scorer" / folder)
    for row in rows:
        verdict = asyncio.run(reward_model(Task.ask(""), row, path=path, reads="token_ids"))
        assert row.rewards["reward_model"] == pytest.approx(verdict.value, abs=1e-6)
    assert len(rows) == 12
    assert len({row.reward for row in rows}) > 1


def test_a_resumed_run_keeps_the_version_and_refuses_another_model(scored: Store) -> None:
    run(scored, online())
    before = recorded(scored)
    more = online().model_copy(update={"trainer": online().trainer.model_copy(update={"steps": 3})})
    run(scored, more, resume=True)
    assert recorded(scored)["explorer"] == before["explorer"]
    pinned = {"reward_model": {"run": "scorer", "digest": "0" * 32}}
    with pytest.raises(JobError, match=r"have digest .*, expected 0000"):
        run(scored, online(name="other", explorer={"rewards": pinned}))
    with pytest.raises(NotFoundError, match="`scorr` has published no weights; did you mean"):
        run(scored, online(name="other", explorer={"rewards": {"reward_model": {"run": "scorr"}}}))
    nine = {"reward_model": {"run": "scorer", "version": 9}}
    with pytest.raises(ConfigError, match="no weights of version 9"):
        run(scored, online(name="other", explorer={"rewards": nine}))


def test_tasksets_and_evaluations_have_reward_models_of_their_own(scored: Store) -> None:
    mixture = {"addition": {"rewards": {"reward_model": {"run": "scorer", "version": 0}}}}
    settings = {"where": "split = 'eval'", "rewards": BY_RUN, "every_steps": 1}
    run(scored, online(tasks={**SUMS, "mixture": mixture}, evaluate=settings))
    kept = recorded(scored)
    assert kept["tasks"]["mixture"]["addition"]["rewards"]["reward_model"]["version"] == 0
    assert kept["evaluate"]["rewards"]["reward_model"]["version"] == 2
    fresh = table(scored, "experiences WHERE purpose = 'train' AND run_id = 'demo'", "reward")
    assert set(fresh["reward"]) == {0.0}, "a fresh reward model gives every rollout the score 0"
    trained = table(scored, "experiences WHERE purpose = 'eval'", "reward")
    assert all(trained["reward"].abs() > 0)
    done = evaluate(scored, online(evaluate=settings))
    rows = table(scored, f"experiences WHERE run_id = '{done.run_id}'", "reward")
    assert all(rows["reward"].abs() > 0)
    assert done.reward_mean == pytest.approx(rows["reward"].mean())


def test_stored_rows_are_rescored_by_the_model_of_a_run(
    scored: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rescore", "--store", scored.uri, "--json", "--reward"]
    assert cli.run_command([*words, "reward_model: {run: scorer}"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["new"], first["failed"]) == (5, 0)
    out = tmp_path / "folder"
    model = ["export", "model", "scorer", "--out", str(out), "--store", scored.uri]
    assert cli.run_command(model) == 0
    capsys.readouterr()
    by_path = f"reward_model: {{path: {out}, reads: token_ids}}"
    assert cli.run_command([*words, by_path, "--version", "copy"]) == 0
    scores = table(scored, "scores", "experience_id, scorer_version, value")
    assert scores.height == 10
    two = scores.sort("experience_id").partition_by("scorer_version")
    assert two[0]["value"].to_list() == pytest.approx(two[1]["value"].to_list(), abs=1e-6)
    assert cli.run_command([*words, "reward_model: {run: scorr}"]) == 2
    assert "did you mean `scorer`" in capsys.readouterr().err


def test_a_policy_is_no_reward_model(scored: Store) -> None:
    run(scored, config(name="policy", trainer={"steps": 1}))
    with pytest.raises(OperatorError, match="Qwen3ForCausalLM, expected a model for sequence"):
        run(scored, online(explorer={"rewards": {"reward_model": {"run": "policy"}}}))
