"""Games of text commands: what is shown and refused, and what an expert leaves in the store."""

import asyncio
import threading

import pytest
from support.text_games import played

from rlake.loop.environments.environment import Environment
from rlake.loop.environments.expert import episodes
from rlake.loop.environments.text_game import Scene, TextGameEnvironment
from rlake.loop.recipes.toys import sudoku
from rlake.store import Store, Task
from rlake.store.errors import ConfigError, JobError

TASK = Task.ask("Leave the cellar.")


class Cellar:
    """Two steps up are worth half of the score each, a step down loses."""

    def __init__(self) -> None:
        self.stairs = 0
        self.is_closed = False

    def begin(self, task: Task) -> Scene:
        return self._scene("It is dark.\n")

    def act(self, command: str) -> Scene:
        self.stairs += {"Go up": 1, "Go down": -1}.get(command, 0)
        return self._scene("You fall." if self.stairs < 0 else f"Stair {self.stairs}.")

    def hint(self) -> str | None:
        return "Go up" if self.stairs < 2 else None

    def close(self) -> None:
        self.is_closed = True

    def _scene(self, text: str) -> Scene:
        is_done = self.stairs in (-1, 2)
        commands = ("Go up", "Go down", "look")
        return Scene(text=text, commands=commands, score=max(0, self.stairs) / 2, is_done=is_done)


def cellar() -> Environment:
    return TextGameEnvironment(Cellar())


def test_steps_earn_what_the_score_rises_by_and_only_the_whole_score_is_a_win() -> None:
    game = Cellar()
    shown, [first, last] = played(
        TextGameEnvironment(game), TASK, ["go  UP", "<action>Go up</action>"]
    )
    assert shown == "It is dark.\n\nGo up\nGo down\nlook\n"
    assert (first.shown, first.reward) == ("Stair 1.\n\nGo up\nGo down\nlook\n", 0.5)
    assert (last.reward, last.is_done, last.metrics) == (0.5, True, {"environment/won": 1.0})
    assert game.is_closed
    [fallen] = played(cellar(), TASK, ["Go down"])[1]
    assert (fallen.reward, fallen.is_done, fallen.metrics) == (0.0, True, {})


def test_a_command_that_is_not_possible_is_counted_and_moves_nobody() -> None:
    game = TextGameEnvironment(Cellar(), show=["commands"], verbs=["Go"], max_steps=3)
    shown, steps = played(game, TASK, ["fly", "look", "Go up", "Go up"])
    assert shown == "Go up\nGo down\n"
    assert steps[0].metrics == {"environment/invalid": 1.0}
    assert steps[1].metrics == {}  # it is possible, if not listed
    assert [step.reward for step in steps] == [0.0, 0.0, 0.5]
    assert steps[2].is_done


def test_a_text_is_cut_and_commands_that_are_not_known_are_left_to_the_game() -> None:
    game = TextGameEnvironment(Cellar(), show=["text"], longest=5)
    assert played(game, TASK, [])[0] == "It is"


class Slow(Cellar):
    """A game that a test holds up, and that notes what it was asked in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.may_go_on = threading.Event(), threading.Event()
        self.calls: list[str] = []

    def begin(self, task: Task) -> Scene:
        self.entered.set()
        assert self.may_go_on.wait(30), "the test lets it go on"
        self.calls.append("begin")
        return super().begin(task)

    def close(self) -> None:
        self.calls.append("close")


def test_a_cancelled_call_ends_before_the_game_is_closed() -> None:
    game = Slow()
    world = TextGameEnvironment(game)

    async def cancelled() -> None:
        begun = asyncio.ensure_future(world.reset(TASK))
        await asyncio.to_thread(game.entered.wait, 30)
        begun.cancel()
        closed = asyncio.ensure_future(world.close())
        await asyncio.wait([closed], timeout=0.1)  # long enough for one that does not wait
        assert not closed.done()
        game.may_go_on.set()
        await asyncio.wait_for(closed, 30)
        with pytest.raises(JobError, match="the game is closed"):
            await world.reset(TASK)  # as one does whose thread comes late

    asyncio.run(cancelled())
    assert game.calls == ["begin", "close"]


def test_an_experts_episode_is_a_row_to_imitate_and_stored_once(store: Store) -> None:
    for _ in range(2):
        store.append("experiences", list(episodes([TASK], environment=cellar)["experiences"]))
    [row] = store.sql("SELECT * FROM experiences").pl().to_dicts()
    assert (row["source"], row["reward"], row["num_turns"]) == ("expert", 1.0, 2)
    assert row["prompt_text"] == "Leave the cellar."
    said = [
        m["content"] for m in episodes([TASK], environment=cellar)["experiences"][0].messages or ()
    ]
    assert said == [
        "Leave the cellar.\n\nIt is dark.\n\nGo up\nGo down\nlook\n",
        "Go up",
        "Stair 1.\n\nGo up\nGo down\nlook\n",
        "Go up",
    ]


def test_an_environment_without_an_expert_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no expert"):
        episodes([TASK], environment=sudoku)
