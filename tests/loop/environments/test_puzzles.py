"""Games that are made here: each can be won, and winning is what is rewarded."""

import asyncio

import pytest

from rlake.loop.environments.environment import Step
from rlake.loop.recipes.toys import countdown_games, sudoku, sudoku_right, sudokus
from rlake.operators.rewards import countdown
from rlake.store import Experience, Task
from rlake.store.errors import ConfigError


def said(task: Task, text: str | None) -> Experience:
    return Experience(task_id=task.task_id, response_text=text)


def test_the_answer_of_every_countdown_game_makes_its_number() -> None:
    games = list(countdown_games(games=200, held_out=50, numbers=4))
    assert {countdown(game, said(game, game.answer)) for game in games} == {1.0}
    assert len({game.prompt_text for game in games}) == 200
    assert sum(game.split == "eval" for game in games) == 50


def test_games_that_cannot_be_found_are_refused() -> None:
    with pytest.raises(ConfigError, match="of 100 games were found"):
        list(countdown_games(games=100, numbers=2, largest=2, signs="+"))
    with pytest.raises(ConfigError, match="sudokus with 15 blanks were found"):
        list(sudokus(puzzles=1, blanks=15))


def test_a_sudoku_of_nine_has_its_blanks_and_its_solution_is_right() -> None:
    [puzzle] = sudokus(puzzles=1, held_out=0, box=3, blanks=30)
    assert (puzzle.prompt_text or "").count(".") == 30
    assert sudoku_right(puzzle, said(puzzle, puzzle.answer)) == 1.0
    lines = (puzzle.answer or "").splitlines()
    assert {"".join(sorted(line)) for line in lines} == {"123456789"}
    assert {"".join(sorted(column)) for column in zip(*lines, strict=True)} == {"123456789"}


def test_a_sudoku_is_filled_digit_by_digit_and_three_mistakes_end_it() -> None:
    [puzzle] = sudokus(puzzles=1, held_out=0, blanks=4)
    told = puzzle.metadata or {}
    blanks = [(r, c) for r in range(4) for c in range(4) if told["puzzle"][r][c] == 0]
    right = [f"{r + 1} {c + 1} {told['solution'][r][c]}" for r, c in blanks]
    wrong = [f"{r + 1} {c + 1} {told['solution'][r][c] % 4 + 1}" for r, c in blanks]

    async def play(*answers: str) -> list[Step]:
        environment = sudoku()
        await environment.reset(puzzle)
        return [await environment.step({"role": "assistant", "content": a}) for a in answers]

    steps = asyncio.run(play(*right))
    assert sum(step.reward or 0 for step in steps) == pytest.approx(1.0)
    assert [step.is_done for step in steps] == [False, False, False, True]
    lost = asyncio.run(play(wrong[0], "I do not know", wrong[1]))
    assert [step.is_done for step in lost] == [False, False, True]
    assert lost[1].metrics == {"environment/invalid": 1.0}
