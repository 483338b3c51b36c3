"""The packaged recipes: each is complete, each runs, and each algorithm learns what it is for."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench.recipes import DIGITS, PAIRS, TAUGHT, Learned, learn, settings

from rlake.loop import cli
from rlake.loop.algorithms import names
from rlake.loop.config import RunConfig, build, load, recipes
from rlake.loop.config.load import read
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.recipes.toys import expert_answers, step_by_step, unsorted_digits
from rlake.loop.run import run
from rlake.store import Store, Task, connect
from rlake.store.errors import ConfigError

GSPO = ["algorithm=gspo"]
WARM = ("quickstart_grpo", "grpo_curriculum", "grpo_tinker")
"""They go on from the weights of a warm start, whose folder is to be named."""


TOYS = "rlake.loop.recipes.toys"


def is_staged(name: str) -> bool:
    return "stages" in read(name)


@pytest.mark.parametrize("name", recipes())
def test_a_dry_run_of_every_recipe_prints_what_it_resolves_to(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ["model.path=folder"] if name in WARM else []
    words = [word for text in missing for word in ("--set", text)]
    assert cli.run_command(["run", name, "--dry-run", *words]) == 0
    told = capsys.readouterr().out
    assert f"name: {name}" in told
    assert "# From this follows" in told
    if not is_staged(name):
        made = load(name, missing)
        assert (made.name, build(yaml.safe_load(told))) == (name, made)


def algorithm_of(config: RunConfig) -> str:
    return config.algorithm if isinstance(config.algorithm, str) else next(iter(config.algorithm))


def differences(one: object, other: object, path: str = "") -> set[str]:
    """The keys in which two trees differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = {**one, **other}
        found = (differences(one.get(k), other.get(k), f"{path}.{k}".strip(".")) for k in keys)
        return set().union(*found)
    return set() if one == other else {path}


def test_an_algorithm_is_one_setting_over_a_recipe() -> None:
    one, other = (load("grpo_digits", sets).model_dump(mode="json") for sets in ([], GSPO))
    assert differences(one, other) == {"algorithm"}
    assert other["algorithm"] == "gspo"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_extends_a_recipe_or_another_file_key_by_key(tmp_path: Path) -> None:
    write(tmp_path, "first.yaml", "{extends: grpo_digits, name: first, trainer: {steps: 7}}")
    (tmp_path / "deeper").mkdir()
    path = write(
        tmp_path / "deeper",
        "second.yaml",
        "{extends: ../first.yaml, name: second, algorithm: {rloo: {group_size: 3}},"
        " trainer: {batch_size: 5}, model: {from_scratch: {layers: 1}}}",
    )
    base, made = load("grpo_digits"), load(path, ["trainer.weight_decay=0.5"])
    assert differences(base.model_dump(mode="json"), made.model_dump(mode="json")) == {
        "name",
        "algorithm",
        "trainer.steps",
        "trainer.batch_size",
        "trainer.weight_decay",
        "model.from_scratch.layers",
    }
    assert (made.name, made.trainer.steps, made.trainer.batch_size) == ("second", 7, 5)


def test_what_is_chosen_by_name_is_replaced_and_null_takes_a_section_away(tmp_path: Path) -> None:
    write(
        tmp_path,
        "base.yaml",
        "{extends: mix_digits, name: base, explorer: {rewards: {exact_match: 0.5}},"
        " algorithm: {mix: {mu: 0.5, group_size: 4}}}",
    )
    path = write(
        tmp_path,
        "c.yaml",
        "{extends: base.yaml, name: c, algorithm: {mix: {mu: 0.1}}, trainer: {sampler: fifo},"
        " tasks: {generator: {my.tasks:sums: {low: 0}}}, explorer: {rewards: {boxed: 1.0}}}",
    )
    made = load(path)
    assert made.algorithm == {"mix": {"mu": 0.1}}
    assert made.trainer.sampler.mixed is None
    assert made.tasks.generator == {"my.tasks:sums": {"low": 0}}
    assert made.explorer is not None
    assert made.explorer.rewards == {"boxed": 1.0}
    assert load(write(tmp_path, "d.yaml", "{extends: c.yaml, explorer: null}")).explorer is None


def test_what_a_taskset_chooses_by_name_is_replaced_and_the_rest_is_kept(tmp_path: Path) -> None:
    mixture = "{tasks: {mixture: {a: {rewards: {exact_match: 2.0}, group_size: 4}}}}"
    write(tmp_path, "base.yaml", "{extends: grpo_digits, name: base, " + mixture[1:])
    again = "{extends: base.yaml, tasks: {mixture: {a: {rewards: {boxed: 1.0}, weight: 3}}}}"
    made = load(write(tmp_path, "c.yaml", again)).explorer_for("a")
    assert (made.rewards, made.group_size) == ({"boxed": 1.0}, 4)


def test_a_model_from_elsewhere_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = write(tmp_path, "c.yaml", "{extends: grpo_digits, model: {path: folder}}")
    assert (load(path).model.path, load(path).model.from_scratch) == ("folder", None)
    path = write(tmp_path, "d.yaml", "{extends: grpo_digits, model: {dtype: float32}}")
    assert load(path).model == load("grpo_digits").model
    taught = "{extends: on_policy_distillation_digits, trainer: {teacher: {path: there}}}"
    teacher = load(write(tmp_path, "e.yaml", taught)).trainer.teacher
    assert teacher is not None
    assert (teacher.path, teacher.run) == ("there", None)
    for name in ("grpo_gsm8k", "orders", "grpo_sglang"):  # as their comments say
        model = load(name, ["model.path=folder"]).model
        assert (model.path, model.from_scratch) == ("folder", None)
    tiny = load("grpo_gsm8k", ["model.path=folder", "model.from_scratch.alphabet=ab"]).model
    assert (tiny.path, tiny.from_scratch and tiny.from_scratch.alphabet) == (None, "ab")
    teacher = load("on_policy_distillation_digits", ["trainer.teacher.path=there"]).trainer.teacher
    assert teacher is not None
    assert (teacher.path, teacher.run) == ("there", None)


def test_what_extends_itself_is_refused_with_the_circle(tmp_path: Path) -> None:
    one = write(tmp_path, "one.yaml", "{extends: two.yaml, name: one}")
    write(tmp_path, "two.yaml", "{extends: one.yaml, name: two}")
    with pytest.raises(ConfigError, match=r"one.yaml` extends itself: .*two.yaml extends .*one"):
        load(one)


@pytest.mark.parametrize(
    ("extends", "said"),
    [
        ("grpo_digit", "recipe `grpo_digit` does not exist; did you mean `grpo_digits`?"),
        ("there.yaml", "configuration file `there.yaml` does not exist"),
        ("[grpo_digits]", "`extends` must name a recipe or a file, got \\['grpo_digits'\\]"),
    ],
)
def test_what_cannot_be_extended_is_named(tmp_path: Path, extends: str, said: str) -> None:
    path = write(tmp_path, "c.yaml", f"{{extends: {extends}, name: c}}")
    with pytest.raises(ConfigError, match=said.replace("?", "\\?")):
        load(path)


def test_a_dry_run_prints_the_merged_tree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "c.yaml", "{extends: grpo_digits, name: c, algorithm: dapo}")
    assert cli.run_command(["run", str(path), "--dry-run", "--full"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["algorithm"], told["trainer"]["batch_size"]) == ("dapo", 16)
    assert "extends" not in told
    assert build(told) == load(path)


def test_a_dry_run_prints_what_is_set_and_what_follows_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "c.yaml", "{extends: grpo_digits, name: c, trainer: {steps: 7}}")
    assert cli.run_command(["run", str(path), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert build(yaml.safe_load(told)) == load(path)
    assert "max_nonfinite_steps" not in told  # a default
    for line in (
        "a step trains on 16 groups of 8 rollouts: 128 rows",
        "7 steps draw 112 groups",
        "the advantage of a row is `group_zscore(",
        "at most 0 batches ahead, and rows are drawn at most 0 steps old",
    ):
        assert line in told


def stored(store: Store, sql: str) -> list[tuple[Any, ...]]:
    return store.sql(sql).fetchall()


def test_rows_that_a_recipe_makes_are_stored_once_and_before_it_draws(store: Store) -> None:
    made = load("sft_digits", ["trainer.steps=2", "trainer.batch_size=8"])
    run(store, made)
    longer = load("sft_digits", ["trainer.steps=3", "trainer.batch_size=8"])
    run(store, longer, resume=True)
    counted = "SELECT count(*), count(DISTINCT task_id), avg(reward) FROM experiences"
    [(rows, tasks, reward)] = stored(store, counted)
    [(train,)] = stored(store, "SELECT count(*) FROM tasks WHERE split = 'train'")
    assert (rows, tasks, reward) == (train, train, 1.0)
    assert stored(store, "SELECT max(step) FROM draws_current") == [(3,)]


def test_an_expert_who_is_sometimes_wrong_gives_the_answers_to_other_tasks() -> None:
    tasks = list(unsorted_digits())
    rows = expert_answers(tasks, wrong=0.25, answers=4)["experiences"]
    right = [row.reward == 1.0 for row in rows]
    assert len(rows) == 4 * len(tasks)
    assert 0.7 < sum(right) / len(right) < 0.9  # some answers are right by chance
    assert {row.response_text for row in rows} <= {task.answer for task in tasks}
    others = expert_answers(tasks[:20], wrong=0.25, answers=4)["experiences"]
    assert not {r.experience_id for r in rows} & {r.experience_id for r in others}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("expert_answers", "no row generator `expert_answers`; write `package.module:function`"),
        (f"{TOYS}:expert_answer", "has no `expert_answer`; did you mean `expert_answers`"),
        ({f"{TOYS}:expert_answers": {"wrongly": 1}}, "expert_answers` cannot be called so"),
    ],
)
def test_a_maker_of_rows_that_does_not_fit_is_refused_before_work(
    store: Store, make: Any, said: str
) -> None:
    tree = load("sft_digits").model_dump(mode="json")
    with pytest.raises(ConfigError, match=said):
        run(store, RunConfig.model_validate({**tree, "data": {"generator": make}}))
    assert store.count("experiences") == 0


def test_a_try_of_several_steps_is_a_row_for_each_with_the_reward_of_all() -> None:
    task = Task.ask("210=", "012")
    rows = asyncio.run(step_by_step(task, ScriptedPolicy(["0", "1", "3", "", "9"])))
    assert [row.prompt_text for row in rows] == ["210=", "210=0", "210=01", "210=013"]
    assert [row.response_text for row in rows] == ["0", "1", "3", ""]
    assert [row.reward for row in rows] == [pytest.approx(2 / 3)] * 4
    assert {row.task_id for row in rows} == {task.task_id}
    endless = asyncio.run(step_by_step(task, ScriptedPolicy(lambda messages, i: "0"), steps=2))
    assert len(endless) == 2


def run_short(name: str, store: Store, overrides: Sequence[str] = ()) -> None:
    """Two steps of a recipe, as a user would ask for them."""
    words = [word for text in overrides for word in ("--set", text)]
    steps = ["--set", "trainer.steps=2"]
    assert cli.run_command(["run", name, "--store", store.uri, "--json", *steps, *words]) == 0


OF_OTHERS = {
    "agentscope": "the package agentscope (tests/loop/workflows/test_agent_program.py)",
    "alfworld": "ALFWorld's game files (tests/loop/environments/test_alfworld.py)",
    "langgraph": "the package langgraph (tests/loop/workflows/test_agent_program.py)",
}
"""Recipes that need what their configuration does not say, and where else they are tested."""


def needed(name: str) -> str | None:
    """What a recipe needs that is not in the package, as its configuration says; None: nothing."""
    tree = read(name)
    config = load(name, ["model.path=folder"] if name in WARM else [])
    engine = config.explorer and config.explorer.engine
    if (engine and (engine.sglang or engine.endpoint)) or config.trainer.backend.tinker:
        return "a server"
    if tree["model"].get("from_scratch") is None:
        return "a model: a warm start's, or one of the hub"
    tasks, data = config.tasks, config.data
    if not (tasks.generator or (data and data.generator)):
        return "tasks or rows that are imported, or are on the hub"
    return OF_OTHERS.get(name)


def test_recipes_run_unless_they_need_what_is_not_in_the_package() -> None:
    found = {name: needed(name) for name in recipes() if not is_staged(name)}
    left_out = {name: why for name, why in found.items() if why}
    assert {name: left_out.get(name) for name in OF_OTHERS} == OF_OTHERS
    assert {name for name, why in left_out.items() if why == "a server"} == {
        "grpo_sglang",
        "grpo_tinker",
    }
    assert len(left_out) < len(found) / 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_recipe_runs(tmp_path: Path) -> None:
    store = connect(tmp_path / "lake")
    run_short("sft_digits", store)  # the teacher of others
    for name in recipes():
        if name != "sft_digits" and not is_staged(name) and needed(name) is None:
            run_short(name, store, ["trainer.batch_size=8"] if load(name).explorer else [])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_algorithm_of_pairs_runs(tmp_path: Path) -> None:
    store = connect(tmp_path / "lake")
    for name in PAIRS:
        run(store, settings(name, "trainer.steps=2"))
    drawn = stored(store, "SELECT DISTINCT run_id FROM draws_current")
    assert {name for (name,) in drawn} == set(PAIRS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_algorithm_learns(tmp_path: Path) -> None:
    found = {name: learned_in_few(name, connect(tmp_path / "lake")) for name in DIGITS}
    assert not {name: one for name, one in found.items() if not is_learned(one)}


def learned_in_few(name: str, store: Store, *, seed: int = 0) -> Learned:
    """Run an algorithm for few steps; online, the first are tries of untrained weights."""
    steps = OFFLINE_STEPS if settings(name).explorer is None else STEPS
    return learn(name, store, seed=seed, steps=steps, edges=(1, 4))


LEAST = 0.15
"""By how much a measure must rise: more than chance can do."""
STEPS, OFFLINE_STEPS = 14, 25
"""A part of what the recipes take: enough to see the rise. The teachers of others are offline."""


def is_learned(one: Learned) -> bool:
    """Online the reward rose by more than chance can do, offline the held-out tasks went better."""
    return one.gain > LEAST


SEEDS = 5
MAJORITY = 4
"""Seeds of five on which each recipe must learn; a policy gradient on a tiny model may miss one."""


def gain(name: str, store: Store, *, seed: int) -> float:
    """How far a recipe's measure rose with a seed, its teacher trained with the same one."""
    if name not in PAIRS:
        if name in TAUGHT:
            learn("sft_digits", store, seed=seed)
        return learn(name, store, seed=seed).gain
    run(store, settings(name, f"seed={seed}"))
    values = stored(
        store, "SELECT value FROM metrics_current WHERE name = 'eval/accuracy' ORDER BY step"
    )
    return float(values[-1][0] - values[0][0])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*DIGITS, *PAIRS])
def test_the_toy_of_every_algorithm_is_learned_on_most_of_five_seeds(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gains = [gain(name, connect(tmp_path / str(seed)), seed=seed) for seed in range(SEEDS)]
    share = sum(one > LEAST for one in gains)
    with capsys.disabled():
        told = ", ".join(f"{one:+.2f}" for one in gains)
        sys.stdout.write(f"\n{name}: learned on {share} of {SEEDS} seeds ({told})\n")
    assert share >= MAJORITY


def test_the_seeds_of_the_long_tier_are_of_every_algorithm() -> None:
    assert {algorithm_of(settings(name)) for name in (*DIGITS, *PAIRS)} == set(names())
