"""TextWorld's games: made from a seed, won by its own walkthroughs, learned from them."""

import sys
from pathlib import Path

import pytest
from support.text_games import played, played_at_random

from rlake.loop import cli
from rlake.loop.environments import textworld
from rlake.loop.environments.expert import episodes
from rlake.loop.environments.textworld import games
from rlake.store import Task, connect
from rlake.store.errors import ConfigError, JobError, MissingExtraError

MADE = {"challenge": "tw-coin_collector", "settings": {"level": 2}, "seed": 3}
installed = pytest.mark.usefixtures("_installed")


@pytest.fixture
def _installed() -> None:
    pytest.importorskip("textworld", reason="needs textworld; `make .venv/.textworld`")


def test_without_the_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "textworld.challenges", None)
    with pytest.raises(MissingExtraError, match=r"rlake\[textworld\]"):
        list(games(train=1, held_out=0, folder=str(tmp_path)))


@pytest.mark.slow
@installed
def test_a_game_is_made_once_and_won_by_its_walkthrough(tmp_path: Path) -> None:
    folder = str(tmp_path)
    [game] = games(settings={"level": 2}, train=1, held_out=0, seed=3, folder=folder)
    assert game.metadata == {"textworld": MADE}
    [file] = tmp_path.glob("*/game.z8")
    [row] = episodes([game], environment={"textworld": {"folder": folder}})["experiences"]
    assert (row.reward, row.num_turns) == (1.0, 2)
    said = [str(m["content"]) for m in row.messages or ()]
    assert "coin" in said[0]  # the objective
    assert said[-1] == "take coin"
    assert ">" not in said[2]
    world = textworld(folder=folder, verbs=["go", "take"])
    shown, [refused, looked] = played(world, game, ["dance", "inventory"])
    assert "\nlook" not in shown
    assert refused.metrics == {"environment/invalid": 1.0}
    assert "You are carrying nothing" in str(looked.shown)
    by_file = Task.ask("?", metadata={"textworld": {"file": str(file)}})
    assert played(textworld(), by_file, said[1::2])[1][-1].reward == 1.0
    assert list(tmp_path.glob("*/game.z8")) == [file]


@pytest.mark.slow
@installed
def test_games_that_cannot_be_made_or_found_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean `tw-cooking`"):
        list(games(challenge="tw-coking", folder=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"within \[1-300\]"):
        list(games(settings={"level": 301}, folder=str(tmp_path)))
    with pytest.raises(JobError, match="see `games`"):
        played(textworld(), Task.ask("?"), [])
    with pytest.raises(JobError, match="cannot be played"):
        played(textworld(), Task.ask("?", metadata={"textworld": {"file": "none.z8"}}), [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.timeout(600)
@installed
def test_what_was_imitated_wins_games_that_are_won_by_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = connect(tmp_path / "lake")
    assert cli.run_command(["run", "textworld", "--store", store.uri]) == 0
    held_out = [
        Task.from_row(row)
        for row in store.sql("SELECT * FROM tasks WHERE split = 'eval'").pl().to_dicts()
    ]
    at_random = [
        played_at_random(textworld(verbs=["go", "take"]), task, max_turns=6, seed=seed)
        for task in held_out
        for seed in range(4)
    ]
    [(before,), (after,)] = store.sql(
        "SELECT avg(reward) FROM experiences WHERE purpose = 'eval' GROUP BY policy_version "
        "ORDER BY policy_version"
    ).fetchall()
    assert before == 0.0
    assert after > sum(at_random) / len(at_random) + 0.4
