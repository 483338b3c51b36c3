"""A configuration that cannot be run is refused before anything is made of it."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.commands import Command

ONLINE = """
name: demo
model:
  from_scratch: {hidden_size: 16, layers: 1, heads: 2, max_length: 48, alphabet: 0123456789+=}
tasks: {generator: {rlake.loop.recipes.toys:addition: {low: 0, high: 4, held_out: 5}}}
algorithm: {grpo: {group_size: 3}}
explorer: {rewards: exact_match, sampling: {max_tokens: 3}}
trainer: {steps: 1, batch_size: 2}
"""
WRONG = [
    "algorithm=grpoo",
    "algorithm={grpo: {group_sise: 3}}",
    "algorithm={grpo: {group_size: many}}",
    "algorithm={dpo: {}}",
    "algorithm=nosuch.module:Algorithm",
    "batch=3",
    "ray.nosuch=1",
    "data.file.path=nowhere.jsonl",
    "data.generator=nosuch",
    "evaluate={every_steps: 1, where: 'nosuch = 1'}",
    "evaluate={every_steps: 1, where: 'task_id ='}",
    "evaluate={every_steps: 1, where: 'false'}",
    "explorer.engine.nosuch={}",
    "explorer.engine={endpoint: {url: 'http://127.0.0.1:9', model: m}}",
    "explorer.group_size=1",
    "explorer.operators=[nosuch]",
    "explorer.operators=[{length_filter: {nosuch: 1}}]",
    "explorer.operators=[{set: {into: nosuch}}]",
    "explorer.rewards=nosuch",
    "explorer.rewards=nosuch.module:reward",
    "explorer.rewards={exact_match: {nosuch: 1}}",
    "explorer.rewards={exact_match: high}",
    "explorer.sampling.temperature=-1",
    "explorer.sampling.temperature=0",
    "explorer.workflow=nosuch",
    "explorer.workflow={single_turn: {nosuch: 1}}",
    "model={path: ./nowhere}",
    "model={path: ./empty}",
    "model={run: nosuch}",
    "model.from_scratch.heads=3",
    "model.lora={targets: [nosuch]}",
    "trackers=[nosuch]",
    "name=a/b",
    "schedule.max_lag=-1",
    "seed=1e30",
    "tasks.generator=nosuch",
    "tasks.generator={rlake.loop.recipes.toys:addition: {nosuch: 1}}",
    "tasks.where=nosuch = 1",
    "tasks.where=task_id =",
    "tasks.where=false",
    "tasks.selector=nosuch",
    "tasks.selector={easy_to_hard: {by: nosuch}}",
    "tasks.selector={easy_to_hard: {by: '1 +'}}",
    "tasks.selector={by_pass_rate: {weight: '1 +'}}",
    "tasks.selector={random: {nosuch: 1}}",
    "tasks.mixture={nosuch: {weight: 1}}",
    "threads=-1",
    "trainer.lr_scheduler=nosuch",
    "trainer.lr_scheduler={name: linear, kwargs: 1}",
    "trainer.eval_where=nosuch = 1",
    "trainer.freeze=['(']",
    "trainer.freeze=[nosuch]",
    "trainer.priority_update=nosuch",
    "trainer.priority_update=reward > 0",
    "trainer.operators=[nosuch]",
    "trainer.operators=[{response_length: {nosuch: 1}}]",
    "trainer.optimizer=nosuch",
    "trainer.optimizer=torch.optim:Nosuch",
    "trainer.optimizer_kwargs={nosuch: 1}",
    "trainer.sampler=nosuch",
    "trainer.sampler={prioritized: {priority: nosuch}}",
    "trainer.sampler={prioritized: {priority: 'reward +'}}",
    "trainer.sampler={uniform: {nosuch: 1}}",
    "trainer.sampler={mixed: {a: {share: 0.5}, b: {share: 0.5, run: nosuch}}}",
    "trainer.sampler={mixed: {a: {share: 0.5}, b: {share: 0.5, at: nosuch}}}",
    "trainer.sampler={mixed: {a: {share: 0.5}, b: {share: 0.5, source: 'SELECT 1'}}}",
    "trainer.where=nosuch = 1",
    "trainer.where=reward +",
    "trainer.where=reward",
    "trainer.side_columns=['nosuch:x']",
    "trainer.side_columns=['reward=score:nosuch']",
]
OFFLINE = [
    "trainer.at=nosuch",
    "trainer.source=SELECT 1",
    "trainer.source=SELECT nosuch FROM experiences",
    "trainer.where=reward > 5",
    "trainer.teacher={path: ./nowhere}",
]


CONDITIONS = {
    "tasks.where": "spilt = 'train'",
    "evaluate.where": "spilt = 'eval'",
    "trainer.where": "rewrad > 0",
    "trainer.eval_where": "quality > 0",
    "trainer.sampler.mixed.b.where": "rewrad > 0",
}


@pytest.fixture
def refused(rlake: Command) -> Command:
    """Run a command that is used wrongly, and see that nothing came of it."""
    Path("online.yaml").write_text(ONLINE)
    Path("empty").mkdir()

    def call(*args: object) -> CompletedProcess[str]:
        before = sorted(Path().rglob("*"))
        said = rlake(*args)
        assert said.returncode == 2, said.stdout + said.stderr
        assert said.stderr.startswith("error: ")
        assert said.stderr.count("\n") == 1
        assert sorted(Path().rglob("*")) == before
        return said

    return call


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_configuration_is_refused_and_nothing_is_made(refused: Command, wrong: str) -> None:
    refused("run", "online.yaml", "--set", wrong)


@pytest.mark.parametrize("wrong", OFFLINE)
def test_a_wrong_offline_run_is_refused_and_nothing_is_made(refused: Command, wrong: str) -> None:
    given = ("explorer=null", "algorithm=sft", "trainer.steps=null", wrong)
    refused("train", "online.yaml", *(word for one in given for word in ("--set", one)))


@pytest.mark.parametrize("key", CONDITIONS)
def test_a_dry_run_names_the_key_of_a_condition_on_no_column(refused: Command, key: str) -> None:
    sources = "trainer.sampler={mixed: {a: {share: 0.5}, b: {share: 0.5, run: old}}}"
    mixed = ("--set", sources) if "mixed" in key else ()
    known = ("--set", "trainer.side_columns=['good=score:judge']")
    wrong = ("--set", f"{key}={CONDITIONS[key]}")
    said = refused("run", "online.yaml", "--dry-run", *mixed, *known, *wrong)
    assert said.stderr.startswith(f"error: `{key}`: ")


def test_a_dry_run_knows_replaced_columns_and_tables_of_the_user(rlake: Command) -> None:
    Path("online.yaml").write_text(ONLINE)
    known = ("--set", "trainer.side_columns=['good=score:judge']")
    mine = ("--set", "tasks.where=task_id IN (SELECT task_id FROM user_own)")
    right = ("--set", "trainer.where=good > 0", *known, *mine)
    done = rlake("run", "online.yaml", "--dry-run", *right)
    assert done.returncode == 0, done.stderr
