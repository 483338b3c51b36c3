"""ALFWorld's format, played by TextWorld's engine: a small household in place of its data."""

from pathlib import Path

import pytest
from support.household import TASKS, write_games
from support.text_games import played, played_at_random

from rlake.loop import cli
from rlake.loop.environments import alfworld
from rlake.loop.environments.alfworld import games
from rlake.loop.environments.expert import episodes
from rlake.store import Task, connect
from rlake.store.errors import ConfigError, JobError

FIRST = [
    "You are in a kitchen.\nYour task is to: put the mug in the drawer.",
    "go to drawer 1",
    "go to sinkbasin 1",
    "take mug 1 from table 1",
    "take spoon 1 from table 1",  # the other one, in the drawer, comes first by its coordinates
]


@pytest.fixture
def data(tmp_path: Path) -> str:
    write_games(tmp_path / "data")
    return str(tmp_path / "data")


@pytest.fixture
def _installed() -> None:
    for name in ("textworld", "fast_downward"):
        pytest.importorskip(name, reason="needs textworld[pddl]; `make .venv/.textworld`")


installed = pytest.mark.usefixtures("_installed")


def test_tasks_are_the_games_that_alfworld_plays_split_by_their_folders(data: str) -> None:
    made = list(games(folder=data))
    assert [task.split for task in made] == ["train", "train", "eval"]
    kinds = [str((task.metadata or {})["kind"]) for task in made]
    assert kinds == ["pick_and_place_simple", "pick_clean_then_place", "pick_and_place_simple"]
    assert (made[2].metadata or {})["folder"] == "valid_unseen"
    # a path below the folder: the task is the same wherever the data are
    kind = next(iter(TASKS))
    game = f"json_2.1.1/train/{kind}/trial_1/game.tw-pddl"
    assert (made[0].metadata or {})["alfworld"] == {"game": game}
    assert [task.split for task in games(folder=data, train=1, held_out=0)] == ["train"]
    assert len(list(games(folder=data, splits={"valid_unseen": "test"}))) == 1


def test_missing_data_say_where_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="`alfworld-download`"):
        list(games())
    for given, said in ((None, "no game in `alfworld`"), ({"game": "none"}, "ALFWORLD_DATA")):
        task = Task.ask("?", metadata={"alfworld": given})
        with pytest.raises(JobError, match=said):
            played(alfworld(), task, [])
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "game.tw-pddl").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        list(games())


@installed
def test_a_game_is_played_by_the_engine_and_won_by_the_planner(data: str) -> None:
    simple, cleaned, _ = games(folder=data)
    shown, steps = played(
        alfworld(folder=data), simple, ["fly", "take mug 1 from table 1", "go to drawer 1"]
    )
    assert shown.replace("\n\n", "\n").splitlines() == [*FIRST[0].splitlines(), *FIRST[1:]]
    assert steps[0].metrics == {"environment/invalid": 1.0}
    assert "You pick up the mug 1 from the table 1." in str(steps[1].shown)
    assert [step.reward for step in steps] == [0.0, 0.0, 0.0]
    made = episodes([simple, cleaned], environment={"alfworld": {"folder": data}})["experiences"]
    assert [row.reward for row in made] == [1.0, 1.0]
    said = [str(m["content"]) for m in made[1].messages or () if m["role"] == "assistant"]
    assert "clean mug 1 with sinkbasin 1" in said
    assert said[-1] == "put mug 1 in drawer 1"
    won = played(alfworld(folder=data), simple, ["take mug 1 from table 1", "go to drawer 1"])[1]
    assert not won[-1].is_done
    chance = [
        played_at_random(alfworld(folder=data), cleaned, max_turns=6, seed=seed)
        for seed in range(5)
    ]
    assert sum(chance) < 3


@installed
def test_a_file_that_holds_no_game_is_named(tmp_path: Path) -> None:
    write_games(tmp_path / "data")
    good = next((tmp_path / "data").glob("**/*.tw-pddl")).read_text()
    task = Task.ask("?", metadata={"alfworld": {"game": "game.tw-pddl"}})
    undeclared, cut = (
        good.replace("(:goal (and (", "(:goal (and (no"),
        good.replace("(:goal (", "(:goal "),
    )
    for text, said in (("{}", "KeyError"), (undeclared, "SystemExit"), (cut, "ParseError")):
        (tmp_path / "game.tw-pddl").write_text(text)
        with pytest.raises(JobError, match=f"cannot be played as a game: {said}"):
            played(alfworld(folder=str(tmp_path)), task, [])


@pytest.mark.slow
@installed
def test_the_recipe_plays_the_games_at_hand(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", data)
    store = connect(tmp_path / "lake")
    words = ["trainer.steps=1", "trainer.batch_size=1", "explorer.sampling.max_tokens=8"]
    words += ["evaluate.every_steps=null", "algorithm={grpo: {group_size: 2}}"]
    sets = [word for text in words for word in ("--set", text)]
    assert cli.run_command(["run", "alfworld", "--store", store.uri, "--json", *sets]) == 0
    [(rows, turns)] = store.sql("SELECT count(*), max(num_turns) FROM experiences").fetchall()
    assert rows == 2
    assert turns > 1
