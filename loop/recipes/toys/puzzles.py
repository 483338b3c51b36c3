"""Puzzles: sudokus with one solution, and the countdown game."""

import re
from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from ....operators.answer_extraction import reply
from ....store import Experience, Task
from ....store.errors import JobError
from ....store.records import Message
from ...environments.environment import Shown, Step
from .data import different

Grid = list[list[int]]
"""Rows of digits; 0 is blank."""
Term = tuple[int, list[int]]
"""1 or -1, and the indices of its factors."""
_SUDOKU_MISSES = 1000
"""Fewer than usual, because a draw takes milliseconds."""


def countdown_games(
    *,
    games: int = 1000,
    held_out: int = 100,
    numbers: int = 3,
    largest: int = 9,
    signs: str = "+-*",
    seed: int = 0,
    taskset: str = "countdown_games",
) -> Iterator[Task]:
    """Yield different games: combine numbers, each used once, into a target above 0.

    The answer is one expression with the target as its value: positive terms first, each in the
    given order. The reward `countdown` accepts any.

    >>> [game] = countdown_games(games=1, held_out=0)
    >>> game.prompt_text, game.answer
    ('8,6,5=19:', '8+6+5')
    """
    rng = np.random.default_rng(seed)

    def draw() -> tuple[Hashable, tuple[list[int], int, str]] | None:
        given = [int(n) for n in rng.integers(1, largest + 1, numbers)]
        chosen = [signs[i] for i in rng.integers(0, len(signs), numbers - 1)]
        terms = _terms([int(place) for place in rng.permutation(numbers)], chosen)
        target = sum(sign * prod(given[place] for place in places) for sign, places in terms)
        if target <= 0:
            return None
        return (tuple(sorted(given)), target), (given, target, _written(given, terms))

    advice = "ask for fewer `games`, or raise `largest`"
    drawn = different(draw, games, what="games", advice=advice)
    for i, (given, target, answer) in enumerate(drawn):
        yield Task.ask(
            f"{','.join(map(str, given))}={target}:",
            answer,
            taskset=taskset,
            split="eval" if i < held_out else "train",
            metadata={"numbers": given, "target": target},
        )


def _terms(places: Sequence[int], signs: Sequence[str]) -> list[Term]:
    """Return the terms of a sum, in the answer's order."""
    terms: list[Term] = [(1, [places[0]])]
    for sign, place in zip(signs, places[1:], strict=True):
        if sign == "*":
            terms[-1][1].append(place)
        else:
            terms.append((1 if sign == "+" else -1, [place]))
    return sorted(((sign, sorted(factors)) for sign, factors in terms), key=lambda t: (-t[0], t[1]))


def _written(given: Sequence[int], terms: Sequence[Term]) -> str:
    products = ["*".join(str(given[place]) for place in places) for _, places in terms]
    signs = ["+" if sign > 0 else "-" for sign, _ in terms]
    return "".join(map("".join, zip(signs, products, strict=True))).removeprefix("+")


def sudokus(
    *,
    puzzles: int = 100,
    held_out: int = 20,
    box: int = 2,
    blanks: int = 4,
    seed: int = 0,
    taskset: str = "sudokus",
) -> Iterator[Task]:
    """Yield sudokus of box * box digits, each with one solution; blanks are dots.

    More `blanks` are harder. The answer is the solution, row by row.

    >>> [puzzle] = sudokus(puzzles=1, held_out=0)
    >>> print(puzzle.prompt_text)
    23.4
    .1.2
    124.
    3421
    <BLANKLINE>
    >>> puzzle.answer
    '2314\\n4132\\n1243\\n3421'
    """
    rng = np.random.default_rng(seed)

    def draw() -> tuple[Hashable, tuple[Grid, Grid]] | None:
        solution = _filled(box, rng)
        puzzle = _dug(solution, box, blanks, rng)
        return None if puzzle is None else (_text(puzzle), (puzzle, solution))

    what, advice = f"sudokus with {blanks} blanks", "ask for fewer"
    drawn = different(draw, puzzles, patience=_SUDOKU_MISSES, what=what, advice=advice)
    for i, (puzzle, solution) in enumerate(drawn):
        yield Task.ask(
            _text(puzzle),
            _text(solution).strip(),
            taskset=taskset,
            split="eval" if i < held_out else "train",
            metadata={"puzzle": puzzle, "solution": solution},
        )


def sudoku_right(task: Task, experience: Experience) -> float | None:
    """Return the share of blanks that an answer fills correctly; 0.0 if it changes given digits.

    >>> [puzzle] = sudokus(puzzles=1, held_out=0)
    >>> sudoku_right(puzzle, Experience(task_id="t", response_text="2314 4132 1243 3422"))
    0.0
    >>> sudoku_right(puzzle, Experience(task_id="t", response_text="2334 4132 1243 3421"))
    0.75
    """
    message = task.metadata or {}
    if "puzzle" not in message:
        return None
    given, right = ([c for row in message[key] for c in row] for key in ("puzzle", "solution"))
    said = [int(c) for c in reply(experience) if c.isdigit()]
    if len(said) != len(right) or any(g not in (0, s) for g, s in zip(given, said, strict=True)):
        return 0.0
    blanks = [s == r for g, s, r in zip(given, said, right, strict=True) if g == 0]
    return sum(blanks) / max(len(blanks), 1)


def _filled(box: int, rng: np.random.Generator) -> Grid:
    """Return a full grid: the regular one with rows, columns and digits shuffled within boxes."""
    size = box * box
    lines = [
        [b * box + int(i) for b in rng.permutation(box) for i in rng.permutation(box)]
        for _ in range(2)
    ]
    digits = [int(d) + 1 for d in rng.permutation(size)]
    return [[digits[(box * (r % box) + r // box + c) % size] for c in lines[1]] for r in lines[0]]


def _dug(solution: Grid, box: int, blanks: int, rng: np.random.Generator) -> Grid | None:
    """Return the grid with `blanks` blanks and still one solution; None if that is impossible."""
    grid, left = [list(row) for row in solution], blanks
    size = len(grid)
    for place in rng.permutation(size * size).tolist():
        if left == 0:
            break
        r, c = divmod(place, size)
        digit, grid[r][c] = grid[r][c], 0
        if _solutions(grid, box, most=2) == 1:
            left -= 1
        else:
            grid[r][c] = digit
    return grid if left == 0 else None


def _solutions(grid: Grid, box: int, *, most: int) -> int:
    """Count the solutions of a grid, up to `most`, starting with the most constrained blank."""
    size = len(grid)
    blanks = [(r, c) for r, c in product(range(size), repeat=2) if grid[r][c] == 0]
    if not blanks:
        return 1
    r, c = min(blanks, key=lambda place: len(fitting(grid, box, *place)))
    found = 0
    for digit in fitting(grid, box, r, c):
        grid[r][c] = digit
        found += _solutions(grid, box, most=most - found)
        grid[r][c] = 0
        if found >= most:
            break
    return found


def fitting(grid: Grid, box: int, r: int, c: int) -> list[int]:
    """Return the digits that a blank may have: those absent from its row, column and box."""
    top, left = r - r % box, c - c % box
    taken = {*grid[r], *(row[c] for row in grid)}
    taken |= {grid[top + i][left + j] for i, j in product(range(box), repeat=2)}
    return [digit for digit in range(1, len(grid) + 1) if digit not in taken]


def _text(grid: Grid) -> str:
    return "".join("".join(str(d or ".") for d in row) + "\n" for row in grid)


class SudokuEnvironment:
    """One puzzle of `sudokus`: an answer is a row, a column and a digit, each from 1.

    Each right digit is worth its share of the blanks, so that a whole solution is worth 1. A wrong
    digit is not written; after `most_wrong` of them the episode ends.
    """

    def __init__(self, *, most_wrong: int = 3) -> None:
        self._most_wrong, self._wrong, self._blanks = most_wrong, 0, 0
        self._grid: list[list[int]] = []
        self._solution: Sequence[Sequence[int]] = []

    async def reset(self, task: Task) -> Shown:
        """Start the episode; the puzzle is the task's prompt."""
        message = task.metadata or {}
        if not {"puzzle", "solution"} <= message.keys():
            raise JobError(f"task {task.task_id} has no puzzle; make tasks by `sudokus`")
        self._grid = [list(row) for row in message["puzzle"]]
        self._solution, self._wrong = message["solution"], 0
        self._blanks = sum(digit == 0 for row in self._grid for digit in row)
        return list(task.messages)

    async def step(self, answer: Message) -> Step:
        """Write a digit if it is right."""
        found = re.findall(r"\d", str(answer.get("content") or ""))
        places = [int(digit) for digit in found]
        size = len(self._grid)
        if len(places) != 3 or not all(1 <= place <= size for place in places):
            return self._no("expected a row, a column and a digit", {"environment/invalid": 1.0})
        row, column, digit = places[0] - 1, places[1] - 1, places[2]
        if self._grid[row][column]:
            return self._no("this cell is not blank", {"environment/invalid": 1.0})
        if self._solution[row][column] != digit:
            return self._no(f"{digit} is wrong there", {"sudoku/wrong": 1.0})
        self._grid[row][column] = digit
        is_done = all(all(line) for line in self._grid)
        return Step(shown=_text(self._grid), reward=1 / self._blanks, is_done=is_done)

    async def close(self) -> None:
        """Do nothing: no resources are held."""

    def _no(self, why: str, metrics: dict[str, float]) -> Step:
        self._wrong += 1
        return Step(
            shown=f"{why}\n{_text(self._grid)}",
            reward=0.0,
            is_done=self._wrong >= self._most_wrong,
            metrics=metrics,
        )


def sudoku(**parameters: Any) -> SudokuEnvironment:
    """Return a sudoku that is filled digit by digit, as `{sudoku: {most_wrong: 3}}`."""
    return SudokuEnvironment(**parameters)
