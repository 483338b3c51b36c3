"""The configuration: one typed tree, whose mistakes are named before any work is done."""

import subprocess
import sys
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import config, written

from rlake.loop import config as config_module
from rlake.loop.cli.run_summary import warn_of_dropped
from rlake.loop.config import ScheduleConfig, build, load, recipes
from rlake.loop.config.json_schema import json_schema
from rlake.loop.report.summary import summary
from rlake.loop.run import check
from rlake.loop.tasks.prepare import prepare_tasks, select
from rlake.store import Store
from rlake.store.errors import ConfigError

SMALLEST = {"name": "demo", "model": {"from_scratch": {}}, "algorithm": "sft"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algoritm": "sft"}, "unknown key `algoritm`; did you mean `algorithm`?"),
        ({"trainer": {"step": 3}}, "unknown key `trainer.step`; did you mean `steps`?"),
        (
            {"model": {"from_scratch": {"layer": 1}}},
            "unknown key `model.from_scratch.layer`; did you mean `layers`?",
        ),
        (
            {"explorer": {"sampling": {"temprature": 1}}},
            "unknown key `explorer.sampling.temprature`; did you mean `temperature`?",
        ),
        ({"name": None}, "`name`: input should be a valid string, got None"),
        ({"name": "a b"}, "`name`: string should match pattern"),
        ({"name": "../x"}, "`name`: string should match pattern"),
        ({"trainer": {"steps": "many"}}, "`trainer.steps`: input should be a valid integer"),
        ({"trainer": {"steps": 0}}, "`trainer.steps`: input should be greater than or equal to 1"),
        ({"trainer": {"betas": [0.9]}}, "`trainer.betas"),
        ({"trainer": {"lr_scheduler": {"name": "slow"}}}, "`trainer.lr_scheduler.name`"),
        (
            {"trainer": {"optimizer": "adamww"}},
            "nor the name of an optimizer; did you mean `adamw`?",
        ),
        ({"model": "gpt"}, "`model`: input should be a valid dictionary"),
        (
            {"model": {"from_scratch": {}, "rope_parameters": "yarn"}},
            "`model.rope_parameters`: input should be a valid dictionary, got 'yarn'",
        ),
        ({"trainer": {"steps": True}}, "`trainer.steps`: input should be a number, got True"),
        ({"seed": True}, "`seed`: input should be a number, got True"),
        ({"trainer": {"betas": [True, 0.9]}}, "`trainer.betas.0`: input should be a number"),
        ({"trainer": {"betas": [2, 0.9]}}, "`trainer.betas.0`: input should be less than 1"),
        ({"trainer": {"betas": [0.9, -1]}}, "`trainer.betas.1`: input should be greater than"),
        (
            {"schedule": {"timeout": float("inf")}},
            "`schedule.timeout`: input should be a finite number",
        ),
        (
            {"explorer": {"sampling": {"temperature": float("nan")}}},
            "`explorer.sampling.temperature`: input should be",
        ),
        ({"explorer": {"rewards": {"exact_match": True}}}, "input should be a number, got True"),
        ({"model": {"from_scratch": {}, "device": "gpu"}}, "`model.device`: string should match"),
        (
            {"model": {"from_scratch": {}, "device": "cuda:x"}},
            "`model.device`: string should match",
        ),
        (
            {"model": {"from_scratch": {}, "dtype": "int8"}},
            "`model.dtype`: input should be 'float32', 'bfloat16' or 'float16', got 'int8'",
        ),
        ({"model": {"from_scratch": None}}, "`model`: has neither `path` nor `from_scratch`"),
        (
            {"model": {"from_scratch": {}, "path": "x"}},
            "`model`: has both `path` and `from_scratch`",
        ),
        ({"algorithm": 3}, "`algorithm`: input should be a valid string, got 3"),
        ({"algorithm": {"grpo": 3}}, "`algorithm.grpo`: input should be a valid dictionary, got 3"),
        (
            {"explorer": {"rewards": {"exact_match": "much"}}},
            "`explorer.rewards.exact_match`: input should be a valid number",
        ),
        ({"explorer": {}}, "trainer.steps is missing; a run with an explorer needs it"),
        (
            {"explorer": {}, "trainer": {"steps": 1, "sampler": "uniform"}},
            "schedule.max_lag is missing; a run that draws rows again needs their largest age",
        ),
        (
            {"explorer": {}, "trainer": {"steps": 1, "max_uses": 2}},
            "draws rows again needs their largest age, in optimizer steps",
        ),
        (
            {"schedule": {"publish_every": 2}},
            "`schedule`: publish_every 2 is more than max_ahead + 1",
        ),
        (
            {"schedule": {"max_ahead": 2, "max_lag": 1}},
            "`schedule`: max_lag 1 is less than max_ahead + publish_every - 1 = 2",
        ),
        ({"schedule": {"max_ahead": -1}}, "`schedule.max_ahead`"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_what_would_be_right(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(SMALLEST | changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize("key", ["name", "model", "algorithm"])
def test_what_must_be_said_is_missed(key: str) -> None:
    with pytest.raises(ConfigError, match=f"key `{key}` is missing"):
        build({k: v for k, v in SMALLEST.items() if k != key})


def test_the_smallest_configuration_is_enough_and_does_not_change() -> None:
    made = build(SMALLEST)
    assert made.trainer.max_uses == 1
    with pytest.raises(ValueError, match="frozen"):
        made.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("schedule", "lag"),
    [
        (ScheduleConfig(), 0),
        (ScheduleConfig(max_ahead=1), 1),
        (ScheduleConfig(max_ahead=3, publish_every=2), 4),
        (ScheduleConfig(max_ahead=1, max_lag=5), 5),
    ],
)
def test_the_oldest_rows_allowed_follow_from_the_schedule(
    schedule: ScheduleConfig, lag: int
) -> None:
    assert schedule.lag == lag


def test_overrides_set_any_key_with_values_as_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: demo\nmodel: {from_scratch: {}}\nalgorithm: grpo\n")
    made = load(
        path,
        [
            "trainer.steps=7",
            "trainer.learning_rate=5e-4",
            "algorithm.grpo.clip=0.1",
            "explorer.rewards.exact_match=2",
            "model.from_scratch.alphabet=ab=c",
            "trainer.where=reward > 0",
            "schedule.max_lag=null",
        ],
    )
    assert (made.trainer.steps, made.trainer.learning_rate) == (7, 5e-4)
    assert made.algorithm == {"grpo": {"clip": 0.1}}
    assert made.explorer is not None
    assert made.explorer.rewards == {"exact_match": 2.0}
    assert made.model.from_scratch is not None
    assert made.model.from_scratch.alphabet == "ab=c"
    assert made.trainer.where == "reward > 0"
    assert made.schedule.max_lag is None


def test_an_override_of_an_unknown_key_or_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: demo\nmodel: {from_scratch: {}}\nalgorithm: grpo\n")
    with pytest.raises(ConfigError, match=r"unknown key `trainer.stps`; did you mean `steps`"):
        load(path, ["trainer.stps=7"])
    with pytest.raises(ConfigError, match=r"`--set trainer.steps` must look like"):
        load(path, ["trainer.steps"])
    with pytest.raises(ConfigError, match=r"`--set trainer.betas=\[1` is not valid YAML"):
        load(path, ["trainer.betas=[1"])


def test_a_file_that_is_not_there_or_holds_no_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"configuration file `.*none.yaml` does not exist"):
        load(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="must hold keys and values, got list"):
        load(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match=r"broken.yaml` is not valid YAML: line 2, column 1: "):
        load(tmp_path / "broken.yaml")
    with pytest.raises(ConfigError, match="`grpo_arithmetik` does not exist; did you mean `grpo_a"):
        load("grpo_arithmetik")


def test_a_pipeline_given_as_a_run_is_called_one(tmp_path: Path) -> None:
    file = tmp_path / "pairs.yaml"
    file.write_text(
        "source: {table: experiences}\noperators: [pairs]\nsink: {table: preferences}\n"
    )
    with pytest.raises(
        ConfigError, match=r"is a pipeline; run it with `rlake pipeline run .*pairs"
    ):
        load(file)


def test_numbers_may_be_text_as_yaml_reads_them() -> None:
    made = build(SMALLEST | {"trainer": {"learning_rate": "1e-3", "betas": ["9e-1", 0]}})
    assert (made.trainer.learning_rate, made.trainer.betas) == (1e-3, (0.9, 0.0))


@pytest.mark.parametrize("device", ["auto", "cpu", "mps", "cuda", "cuda:1"])
def test_devices_are_those_of_torch(device: str) -> None:
    assert (
        build(SMALLEST | {"model": {"from_scratch": {}, "device": device}}).model.device == device
    )


def test_a_recipe_that_lacks_its_model_is_refused_until_it_is_named() -> None:
    with pytest.raises(ConfigError, match="`model`: has neither `path` nor `from_scratch`"):
        load("quickstart_grpo")
    assert load("quickstart_grpo", ["model.path=folder"]).model.path == "folder"
    with pytest.raises(ConfigError, match="`model`: has neither `path` nor `from_scratch`"):
        load("grpo_arithmetic", ["model.from_scratch=null"])


@pytest.mark.parametrize("first", ["grpo_arithmetic", "quickstart_sft"])
def test_sums_of_digits_and_of_longer_numbers_do_not_mix_in_one_store(
    store: Store, first: str
) -> None:
    digits, longer = load("grpo_arithmetic"), load("quickstart_sft")
    after = load("quickstart_grpo", ["model.path=folder"])
    for made in (digits, longer) if first == digits.name else (longer, digits):
        prepare_tasks(store, made.tasks)
    assert digits.evaluate is not None
    assert longer.evaluate is not None
    assert longer.evaluate == after.evaluate
    wheres = [digits.tasks.where, digits.evaluate.where, after.tasks.where, longer.evaluate.where]
    assert [len(select(store, where)) for where in wheres] == [80, 20, 7600, 500]


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder with a module of rewards and a configuration that names one."""
    (tmp_path / "myrew.py").write_text("def f(task, experience):\n    return 1.0\n")
    (tmp_path / "c.yaml").write_text(
        "{name: demo, model: {from_scratch: {}}, algorithm: grpo, trainer: {steps: 1},"
        " explorer: {rewards: 'myrew:f'}}"
    )
    return tmp_path


@pytest.mark.slow
def test_the_command_finds_modules_in_the_current_folder(beside: Path) -> None:
    # -P: as the console script does it, without the current folder on sys.path
    code = "from rlake.loop.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "run", "c.yaml", "--dry-run"],
        cwd=beside,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_recipes_are_those_in_the_folder() -> None:
    folder = Path(config_module.__file__).parent.parent / "recipes"
    assert recipes() == sorted(p.stem for p in folder.glob("*.yaml"))
    assert len(recipes()) >= 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": "grppo"}, "algorithm `grppo` does not exist; did you mean `grpo`"),
        ({"algorithm": {"grpo": {"klip": 1}}}, "`grpo` has no parameter `klip`"),
        ({"explorer": {"workflow": "single"}}, "no workflow `single`"),
        ({"explorer": {"rewards": "exact"}}, "no reward `exact`; did you mean `exact_match`"),
        ({"explorer": {"rewards": "nowhere:reward"}}, "no reward `nowhere:reward`"),
        ({"explorer": {"rewards": ":x"}}, "no reward `:x`; write `package.module:function`"),
        ({"explorer": {"rewards": ".x:y"}}, "no reward `.x:y`; write `package.module:function`"),
        ({"algorithm": {"grpo": {"clip": -5}}}, "parameter `clip` of `grpo`"),
        ({"explorer": {"sampling": {"temperature": 0}}}, "all rollouts of a task would be equal"),
        ({"explorer": {"group_size": 1}}, "set `explorer.group_size` above 1"),
        ({"algorithm": {"rloo": {"group_size": 1}}}, "set `explorer.group_size` above 1"),
        (
            {"algorithm": {"reinforce_plus_plus": {"baseline": "group_mean"}}},
            "each task has one rollout",
        ),
    ],
)
def test_names_are_looked_up_before_any_work(changes: dict[str, Any], said: str) -> None:
    made = config(**changes)
    with pytest.raises(ConfigError) as caught:
        check(made)
    assert said in str(caught.value)


@pytest.mark.parametrize("algorithm", ["reinforce", "raft", "asymre", "remax", "ppo"])
def test_one_try_at_a_task_is_enough_for_algorithms_that_compare_none(algorithm: str) -> None:
    check(config(algorithm=algorithm, explorer={"group_size": 1}))


def test_what_is_only_measured_is_taken_out_of_what_is_trained_on() -> None:
    def condition(**trainer: str) -> str | None:
        return config(trainer=trainer).trainer.and_where(None)

    assert condition() is None
    assert condition(where="a") == "a"
    assert condition(eval_where="b") == "NOT coalesce((b\n), false)"
    both = condition(where="a OR c", eval_where="b -- x")
    assert both == "(a OR c\n) AND (NOT coalesce((b -- x\n), false)\n)"


def test_what_was_dropped_or_not_scored_is_counted_in_the_summary(store: Store) -> None:
    dropped = written(4, run_id="demo", drop_reason="no answer")
    unscored = written(3, run_id="demo", reward=None)
    others = written(2, run_id="other", drop_reason="no answer")
    made = [*dropped, *unscored, *others]
    store.append("experiences", [replace(row, experience_id=f"e{i}") for i, row in enumerate(made)])
    found = summary(store, config().name)
    assert (found["rows_dropped"], found["rows_unscored"]) == (4, 3)


def test_a_summary_without_dropped_rows_does_not_speak_of_them(store: Store) -> None:
    store.append("experiences", written(2, run_id="demo"))
    assert not {"rows_dropped", "rows_unscored"} & set(summary(store, config().name))


@pytest.mark.parametrize(("dropped", "lines"), [(2, 0), (3, 1)])
def test_a_run_whose_tries_were_mostly_dropped_says_so_on_one_line(
    store: Store, capsys: pytest.CaptureFixture[str], dropped: int, lines: int
) -> None:
    reasons = ["the reward failed:\nKeyError"] * dropped
    rows = zip_longest(written(4, run_id="demo"), reasons)
    store.append("experiences", [replace(row, drop_reason=why) for row, why in rows])
    warn_of_dropped(store, "demo")
    said = capsys.readouterr()
    expected = (
        f"warning: {dropped} of 4 rollouts were dropped and taught nothing; the most "
        "frequent reason: the reward failed: KeyError\n"
    )
    assert (said.out, said.err) == ("", expected * lines)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"explorer": {"tries_at_once": 2}}, "explorer.max_concurrent_rollouts"),
        ({"cluster": {"explorers": 2}}, "ray"),
        ({"trainer": {"reference": {"tiny": {}}}}, "trainer.reference.from_scratch"),
        ({"trainer": {"decay_to": 0.1}}, "trainer.lr_scheduler.min_lr_ratio"),
        ({"tasks": {"mixture": {"a": {"share": 1}}}}, "tasks.mixture.a.weight"),
    ],
)
def test_a_former_key_is_refused_with_the_name_it_has_now(old: dict[str, Any], new: str) -> None:
    with pytest.raises(ConfigError, match=rf"is unknown; it is called `{new}`$"):
        build(SMALLEST | old)


def test_a_key_that_was_removed_is_refused_with_what_holds_instead() -> None:
    engine = {"vllm": {"server": True}}
    with pytest.raises(ConfigError, match=r"vllm\.server` is unknown; vLLM always runs .* remove"):
        build(SMALLEST | {"explorer": {"engine": engine}})


def test_every_key_says_what_it_means() -> None:
    schema = json_schema()
    sections = {"run": schema, **schema["$defs"]}
    silent = [
        f"{section}.{key}"
        for section, fields in sections.items()
        for key, field in fields.get("properties", {}).items()
        if not field.get("description")
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"has `sleep`, and no `memory_share`: .* set `memory_share`"),
        ({"memory_share": 0.5, "engine_args": {"gpu_memory_utilization": 0.5}}, "are the same"),
        ({"memory_share": 0.5, "schedule": "one_step_off"}, r"with schedule\.max_ahead both work"),
        ({"memory_share": 0.5, "schedule": "asynchronous"}, r"with schedule\.streaming both work"),
    ],
)
def test_vllm_sleeps_only_where_explorer_and_trainer_take_turns_and_memory_is_split(
    changes: dict[str, Any], message: str
):
    schedule = changes.pop("schedule", "on_policy")
    explorer = {"engine": {"vllm": {"sleep": True, **changes}}, "rewards": "exact_match"}
    with pytest.raises(ConfigError, match=message):
        config(explorer=explorer, schedule={"preset": schedule, "timeout": 60})
