"""ScienceWorld on a real JVM: its solutions, its failures, and what is learned of them."""

import gc
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.rollouts import rollouts
from support.text_games import played, played_at_random

from rlake.loop import cli
from rlake.loop.environments import scienceworld
from rlake.loop.environments.expert import episodes
from rlake.loop.environments.scienceworld import close_simulators, variations
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.recipes.toys import furniture_mover
from rlake.store import Task, connect
from rlake.store.errors import ConfigError, JobError, MissingExtraError

module: Any = sys.modules["rlake.loop.environments.scienceworld"]
TASK = Task.ask(
    "Move it.",
    metadata={
        "scienceworld": {
            "name": "find-non-living-thing",
            "variation": 6,
            "simplifications": "teleportAction",
        }
    },
)
"""Something is to be moved to the red box in the bathroom."""
MOVED = ["teleport to bathroom", "focus on cup", "move cup to red box"]
PLAYING = {"multi_turn": {"environment": "scienceworld", "max_turns": 9}}


@pytest.fixture
def simulator() -> Iterator[list[Any]]:
    """The idle simulators, which are ended afterwards."""
    pytest.importorskip("scienceworld")
    if shutil.which("java") is None:
        pytest.skip("needs Java")
    yield module._idle
    close_simulators()
    # Here and not in a later test: py4j leaves its sockets to the garbage collector.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def test_without_the_package_or_java_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_idle", [])
    monkeypatch.setenv("PATH", str(tmp_path))
    if "scienceworld" in sys.modules or shutil.which("java") is None:
        pytest.importorskip("scienceworld")
        with pytest.raises(JobError, match="no `java` on the PATH; install a Java runtime"):
            list(variations())
        [row] = rollouts(ScriptedPolicy(MOVED), PLAYING, TASK)
        assert "no `java` on the PATH" in str(row.drop_reason)
    monkeypatch.setitem(sys.modules, "scienceworld", None)
    with pytest.raises(MissingExtraError, match=r"rlake\[scienceworld\]"):
        list(variations())


@pytest.mark.slow
def test_the_score_is_the_reward_and_a_wrong_focus_takes_it_away(simulator: list[Any]) -> None:
    shown, steps = played(scienceworld(longest=25), TASK, ["fly", *MOVED])
    assert shown.startswith("This ")
    assert len(shown) <= 25
    assert str(steps[0].shown).startswith("No known action")
    assert sum(step.reward or 0 for step in steps) == pytest.approx(1.0)
    assert steps[-1].metrics == {"environment/won": 1.0}
    _, lost = played(scienceworld(), TASK, ["teleport to outside", "focus on axe", "look around"])
    assert len(simulator) == 1  # one JVM played both
    assert sum(step.reward or 0 for step in lost) < 1.0


@pytest.mark.slow
def test_solutions_of_the_simulator_win_the_variations_that_are_tasks(simulator: list[Any]) -> None:
    tasks = list(variations(train=1, held_out=1, simplifications="easy"))
    assert [task.split for task in tasks] == ["train", "eval"]
    assert "to the red box in the kitchen" in (tasks[0].prompt_text or "")
    rows = episodes(tasks, environment={"scienceworld": {"simulators": 1}})["experiences"]
    assert [row.reward for row in rows] == pytest.approx([1.0, 1.0])
    assert len(simulator) == 1
    with pytest.raises(ConfigError, match="did you mean `find-plant`"):
        list(variations(name="find-plants"))
    with pytest.raises(ConfigError, match="cannot be played with `hard`"):
        list(variations(simplifications="hard"))


@pytest.mark.slow
def test_an_episode_whose_jvm_is_killed_is_a_row_with_the_error_and_the_next_has_another(
    simulator: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    taken = module._taken

    def taken_and_noted() -> Any:
        begun.append(taken())
        return begun[-1]

    def killing(messages: Any, number: int) -> str:
        if len(begun) == 1 and len(messages) > 2:
            begun[0]._gateway.java_process.kill()
            begun[0]._gateway.java_process.wait(20)
        return MOVED[len(messages) // 2]

    monkeypatch.setattr(module, "_taken", taken_and_noted)
    workflow = {"multi_turn": {"environment": {"scienceworld": {"simulators": 1}}}}
    killed, won = rollouts(ScriptedPolicy(killing), workflow, TASK, TASK)
    assert "the JVM of ScienceWorld failed" in str(killed.drop_reason)
    assert won.drop_reason is None
    assert won.reward == pytest.approx(1.0)
    assert len(begun) == 2


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_was_imitated_solves_variations_of_the_test_set(
    simulator: list[Any], tmp_path: Path
) -> None:
    store = connect(tmp_path / "lake")
    assert cli.run_command(["run", "scienceworld", "--store", store.uri]) == 0
    found = store.sql("SELECT * FROM tasks WHERE split = 'eval' LIMIT 5").pl().to_dicts()
    world = {"lists_commands": True, "max_steps": 6}
    at_random = [
        played_at_random(scienceworld(**world), Task.from_row(row), max_turns=6, seed=0)
        for row in found
    ]
    [(before,), (after,)] = store.sql(
        "SELECT avg((reward > 0.99)::INT) FROM experiences WHERE purpose = 'eval' "
        "GROUP BY policy_version ORDER BY policy_version"
    ).fetchall()
    assert before == 0.0
    assert max(at_random) < 1.0
    assert after > 0.4


def test_the_scripted_expert_refuses_a_task_that_it_does_not_know() -> None:
    with pytest.raises(ConfigError, match="names no room with furniture"):
        furniture_mover("Move it to the red box in the foundry.")
