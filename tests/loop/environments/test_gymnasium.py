"""Gymnasium environments as text: what is shown, what is taken for an action, and what it costs."""

import asyncio
from collections.abc import Sequence

import pytest
from support.rollouts import rollouts

from rlake.loop.environments import gymnasium
from rlake.loop.environments.environment import Environment, Step
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.recipes.toys import frozen_lake, frozen_lakes, frozen_squares, walks
from rlake.loop.recipes.toys.lakes import distances, find
from rlake.store import Task
from rlake.store.errors import ConfigError

LAKE = Task.ask("?\n", metadata={"desc": ["SFFF", "FHFH", "FFFH", "HFFG"]})
CROSSED = ("down", "down", "right", "down", "right", "right")


def played(environment: Environment, task: Task, answers: Sequence[str]) -> list[Step]:
    """Play an episode to its end, or to that of the answers."""

    async def play() -> list[Step]:
        await environment.reset(task)
        steps: list[Step] = []
        for answer in answers:
            steps.append(await environment.step({"role": "assistant", "content": answer}))
            if steps[-1].is_done:
                break
        await environment.close()
        return steps

    return asyncio.run(play())


def test_a_lake_is_crossed_by_the_names_of_moves_and_only_the_goal_is_worth_something() -> None:
    steps = played(frozen_lake(), LAKE, CROSSED)
    assert [step.reward for step in steps] == [0.0] * 5 + [1.0]
    assert [step.is_done for step in steps] == [False] * 5 + [True]
    assert steps[0].shown == "FFFF\nPHFH\nFFFH\nHFFG\n"


def test_a_hole_ends_the_walk_and_so_does_the_last_step() -> None:
    assert [s.is_done for s in played(frozen_lake(), LAKE, ["d", "r", "r"])] == [False, True]
    slow = played(frozen_lake(max_steps=3), LAKE, ["left"] * 9)
    assert [step.is_done for step in slow] == [False, False, True]
    assert slow[-1].metrics == {"environment/truncated": 1.0}


def test_what_is_no_action_is_counted_and_answered_and_moves_nobody() -> None:
    steps = played(frozen_lake(quiet=False), LAKE, ["I would fly", "down"])
    assert steps[0].metrics == {"environment/invalid": 1.0}
    assert steps[0].reward == 0.0
    told = "`I would fly` is not an action; answer with one of: left, down, right, up\nPFFF\n"
    assert str(steps[0].shown).startswith(told)
    assert str(steps[1].shown).startswith("FFFF\nPHFH")
    lost = played(frozen_lake(max_steps=3), LAKE, ["?"] * 9)
    assert [step.is_done for step in lost] == [False, False, True]


def test_a_try_of_refused_answers_alone_has_a_reward_as_others_that_did_not_arrive() -> None:
    environment = {"rlake.loop.recipes.toys:frozen_lake": {"max_steps": 2}}
    walking = {"multi_turn": {"environment": environment}}
    [row] = rollouts(ScriptedPolicy(["north"]), walking, LAKE)
    assert (row.reward, row.drop_reason) == (0.0, None)
    costly = gymnasium("CliffWalking-v1", refused_reward=-5)
    assert [step.reward for step in played(costly, Task.ask("?"), ["?", "up"])] == [-5.0, -1.0]


@pytest.mark.parametrize(
    ("id", "answer", "shown"),
    [
        ("Taxi-v4", "north", "(North)"),
        ("CliffWalking-v1", "up", "x  o  o"),
        ("Blackjack-v1", "hit", "your sum: "),
    ],
)
def test_other_environments_are_drawn_or_told_in_numbers(id: str, answer: str, shown: str) -> None:
    task = Task.ask("Play.", metadata={"seed": 3})
    [one] = played(gymnasium(id, max_steps=1), task, [answer])
    [again] = played(gymnasium(id, max_steps=1), task, [answer])
    assert shown in str(one.shown)
    assert one == again  # the seed is the task's
    assert one.is_done


def test_an_environment_that_is_not_there_or_moves_by_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown Gymnasium environment `FrozenLakes-v1`"):
        played(gymnasium("FrozenLakes-v1"), LAKE, [])
    with pytest.raises(ConfigError, match="has 4 actions, got 1 names"):
        played(gymnasium("CliffWalking-v1", actions=["up"]), LAKE, [])


def test_lakes_can_be_crossed_and_those_for_measuring_are_others() -> None:
    lakes = list(frozen_lakes(maps=60, held_out=20, holes=0.3, nearest=3))
    maps = [tuple((lake.metadata or {})["desc"]) for lake in lakes]
    assert len(set(maps)) == 60
    assert [lake.split for lake in lakes] == ["eval"] * 20 + ["train"] * 40
    assert min(distances(desc)[find(desc, "S")] for desc in maps) == 3
    with pytest.raises(ConfigError, match="lakes of size 2 with 0% holes were found"):
        list(frozen_lakes(maps=60, size=2, holes=0.0))


def test_a_walker_who_sees_no_holes_often_falls_and_its_moves_alone_are_trained_on() -> None:
    lakes = list(frozen_lakes(maps=60, held_out=0, holes=0.3, nearest=3))
    rows = walks(lakes, alphabet="PFHG\nldru")["experiences"]
    assert len(rows) == 60
    assert 0.2 < sum(row.reward or 0 for row in rows) / 60 < 0.8
    for row in rows:
        assert row.loss_mask is not None
        assert sum(row.loss_mask) == 2 * (row.num_turns or 0)  # a letter and the end of each turn
    moves = walks(lakes, history=False)["experiences"]
    assert {len(row.messages or ()) for row in moves} == {2}


def test_a_walk_begins_at_any_square_and_the_row_and_column_are_all_that_is_told_of_it() -> None:
    squares = list(frozen_squares(held_out=3, show="square"))
    assert sorted(task.split or "" for task in squares) == ["eval"] * 3 + ["train"] * 8
    lake = "FFFF\nFHFH\nFFFH\nHFFG\n"
    assert [task.prompt_text for task in squares[:2]] == [f"{lake}0,0\n", f"{lake}0,1\n"]
    steps = played(frozen_lake(show="square"), squares[1], ["r", "d", "d", "d", "r"])
    assert [step.shown for step in steps] == ["0,2\n", "1,2\n", "2,2\n", "3,2\n", "3,3\n"]
    assert steps[-1].reward == 1.0
    moves = walks(squares[1:2], sees=1.0, lost=0.0, show="square")["experiences"]
    said = [m["content"] for m in moves[-1].messages or ()]
    assert (said[1:5], moves[-1].reward) == (["r", "0,2\n", "d", "1,2\n"], 1.0)


def test_a_walk_is_one_row_whose_reward_is_the_goal() -> None:
    environment = {"rlake.loop.recipes.toys:frozen_lake": {"max_steps": 8}}
    walking = {"multi_turn": {"environment": environment, "max_turns": 8}}
    [row] = rollouts(ScriptedPolicy(CROSSED), walking, LAKE)
    assert (row.drop_reason, row.reward, row.num_turns) == (None, 1.0, 6)
    assert sum(row.loss_mask or ()) == sum(len(move) + 1 for move in CROSSED)
    assert [m["content"] for m in row.messages or ()][:2] == ["?\n", "down"]
