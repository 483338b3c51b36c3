"""Functions, classes and operators of Python stand in a configuration as names."""

from typing import Any

import polars as pl
import pytest
from support.tiny_models import SPEC, Reinforce, share_of_ones

from rlake.loop.algorithms import resolve
from rlake.loop.config import RunConfig, build
from rlake.loop.trajectories.rewards import RewardPart, rewards_of
from rlake.operators import keep, operator
from rlake.operators import resolve as operator_of
from rlake.operators.source_digest import digest
from rlake.store import Experience, Task
from rlake.store.errors import ConfigError


def tree(**changes: Any) -> dict[str, Any]:
    model = {"from_scratch": SPEC}
    return {
        "name": "demo",
        "model": model,
        "algorithm": "grpo",
        "explorer": {},
        "trainer": {"steps": 1},
    } | changes


def made(value: float) -> Any:
    def lenient(task: Task, experience: Experience) -> float:
        return value

    return lenient


@operator("filter")
def brief(*, limit: int = 10) -> pl.Expr:
    return pl.col("response_text").str.len_chars() <= limit


def test_a_function_of_a_module_stands_by_the_name_that_yaml_would_say() -> None:
    config = build(tree(explorer={"rewards": share_of_ones}))
    assert config == build(tree(explorer={"rewards": "support.tiny_models:share_of_ones"}))


def test_a_function_within_a_function_is_found_and_digested_as_any_other() -> None:
    lenient = made(0.5)
    config = build(tree(explorer={"rewards": {lenient: 2.0, share_of_ones: 1.0}}))
    again = RunConfig.model_validate_json(config.model_dump_json())
    assert again.explorer is not None
    found = rewards_of(again.explorer.rewards)
    assert list(found) == ["lenient", "share_of_ones"]
    assert found["lenient"] == RewardPart(lenient, 2.0)
    assert digest(found["lenient"].function) == digest(lenient)


def test_an_operator_and_an_algorithm_stand_with_their_parameters() -> None:
    trainer = {"steps": 1, "operators": [keep(where="reward > 0"), brief(limit=3)]}
    config = build(tree(algorithm=Reinforce(scale=2.0), trainer=trainer))
    assert resolve(config.algorithm) == Reinforce(scale=2.0)
    assert [str(operator_of(spec)) for spec in config.trainer.operators] == [
        "keep(where='reward > 0')",
        "brief(limit=3)",
    ]
    assert resolve(build(tree(algorithm=Reinforce)).algorithm) == Reinforce()


def test_what_has_no_name_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="has no name to be recorded by; write a function with"):
        build(tree(explorer={"rewards": lambda task, experience: 1.0}))


def test_two_functions_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"two functions are called .*locals:lenient"):
        build(tree(explorer={"rewards": {made(0.5): 1.0, made(0.7): 1.0}}))


def test_a_function_that_another_process_cannot_import_is_refused_where_one_would_have_to() -> None:
    ours = tree(explorer={"rewards": made(0.5)})
    with pytest.raises(ConfigError, match="known to this process alone, and Ray imports it; def"):
        build(ours | {"ray": {}})
    with pytest.raises(ConfigError, match="`__main__:exact` is known to this process alone"):
        build(tree(explorer={"rewards": "__main__:exact"}, ray={}))
    several = {"steps": 1, "distributed": {"world_size": 2}}
    build(ours | {"trainer": several})  # the explorer is here
    with pytest.raises(ConfigError, match="each process of the training imports it"):
        build(tree(algorithm="__main__:Mine", trainer=several))
    build(tree(explorer={"rewards": share_of_ones}, ray={}))
