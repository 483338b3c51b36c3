"""The configuration: one typed tree, whose mistakes are named before any work is done."""

from pathlib import Path
from typing import Any

import pytest
from tiny import config

from rlake.loop import config as config_module
from rlake.loop.config import ScheduleConfig, build, load, recipes
from rlake.loop.run import check
from rlake.store.errors import ConfigError

SMALLEST = {"name": "demo", "model": {"tiny": {}}, "algorithm": "sft"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algoritm": "sft"}, "unknown key `algoritm`; did you mean `algorithm`?"),
        ({"trainer": {"step": 3}}, "unknown key `trainer.step`; did you mean `steps`?"),
        (
            {"model": {"tiny": {"layer": 1}}},
            "unknown key `model.tiny.layer`; did you mean `layers`?",
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
        ({"trainer": {"decay": "slow"}}, "`trainer.decay`"),
        ({"model": "gpt"}, "`model`: input should be a valid dictionary"),
        ({"model": {"dtype": "int8"}}, "`model.dtype`"),
        ({"algorithm": 3}, "`algorithm`: input should be a valid string, got 3"),
        ({"algorithm": {"grpo": 3}}, "`algorithm.grpo`: input should be a valid dictionary, got 3"),
        (
            {"explorer": {"rewards": {"exact_match": "much"}}},
            "`explorer.rewards.exact_match`: input should be a valid number",
        ),
        ({"explorer": {}}, "trainer.steps is missing; a run with an explorer needs it"),
        (
            {"explorer": {}, "trainer": {"steps": 1, "sampler": "uniform"}},
            "a run with an explorer draws each row once, with fifo",
        ),
        (
            {"explorer": {}, "trainer": {"steps": 1, "epochs": 2}},
            "a run with an explorer draws each row once, with fifo",
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
    assert made.trainer.epochs == 1
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
    path.write_text("name: demo\nmodel: {tiny: {}}\nalgorithm: grpo\n")
    made = load(
        path,
        [
            "trainer.steps=7",
            "trainer.learning_rate=5e-4",
            "algorithm.grpo.clip=0.1",
            "explorer.rewards.exact_match=2",
            "model.tiny.alphabet=ab=c",
            "trainer.where=reward > 0",
            "schedule.max_lag=null",
        ],
    )
    assert (made.trainer.steps, made.trainer.learning_rate) == (7, 5e-4)
    assert made.algorithm == {"grpo": {"clip": 0.1}}
    assert made.explorer is not None
    assert made.explorer.rewards == {"exact_match": 2.0}
    assert made.model.tiny is not None
    assert made.model.tiny.alphabet == "ab=c"
    assert made.trainer.where == "reward > 0"
    assert made.schedule.max_lag is None


def test_an_override_of_an_unknown_key_or_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: demo\nmodel: {tiny: {}}\nalgorithm: grpo\n")
    with pytest.raises(ConfigError, match=r"unknown key `trainer.stps`; did you mean `steps`"):
        load(path, ["trainer.stps=7"])
    with pytest.raises(ConfigError, match=r"`--set trainer.steps` must look like"):
        load(path, ["trainer.steps"])
    with pytest.raises(ConfigError, match=r"`--set trainer.betas=\[1` is no YAML"):
        load(path, ["trainer.betas=[1"])


def test_a_file_that_is_not_there_or_holds_no_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no configuration file `.*none.yaml`"):
        load(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="must hold keys and values, got list"):
        load(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match=r"broken.yaml` is no YAML"):
        load(tmp_path / "broken.yaml")
    with pytest.raises(ConfigError, match="no recipe `grpo_arithmetik`; did you mean `grpo_arith"):
        load("grpo_arithmetik")


@pytest.mark.parametrize("name", recipes())
def test_every_packaged_recipe_is_complete_and_names_only_what_there_is(name: str) -> None:
    made = load(name)
    assert made.name == name
    check(made)
    assert build(made.model_dump(mode="json")) == made


def test_the_recipes_are_those_in_the_folder() -> None:
    folder = Path(config_module.__file__).parent / "recipes"
    assert recipes() == sorted(p.stem for p in folder.glob("*.yaml"))
    assert len(recipes()) >= 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": "gpro"}, "no algorithm `gpro`; did you mean `grpo`"),
        ({"algorithm": {"grpo": {"klip": 1}}}, "`grpo` has no parameter `klip`"),
        (
            {"explorer": None, "trainer": {"sampler": "fifi"}},
            "no sampler `fifi`; did you mean `fifo`",
        ),
        ({"explorer": {"workflow": "single"}}, "no workflow `single`"),
        ({"explorer": {"rewards": "exact"}}, "no reward `exact`; did you mean `exact_match`"),
        ({"explorer": {"rewards": "nowhere:reward"}}, "no reward `nowhere:reward`"),
        ({"explorer": {"sampling": {"temperature": 0}}}, "all tries at a task would be the same"),
    ],
)
def test_names_are_looked_up_before_any_work(changes: dict[str, Any], said: str) -> None:
    made = config(**changes)
    with pytest.raises(ConfigError) as caught:
        check(made)
    assert said in str(caught.value)


def test_what_is_only_measured_is_taken_out_of_what_is_trained_on() -> None:
    def condition(**trainer: str) -> str | None:
        return config(trainer=trainer).trainer.trained_where

    assert condition() is None
    assert condition(where="a") == "a"
    assert condition(evaluate_loss_where="b") == "NOT coalesce((b\n), false)"
    both = condition(where="a OR c", evaluate_loss_where="b -- x")
    assert both == "(a OR c\n) AND NOT coalesce((b -- x\n), false)"
