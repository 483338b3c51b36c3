"""A sudoku that is filled digit by digit."""

import re
from collections.abc import Sequence
from typing import Any

from ....store.errors import JobError
from ....store.records import Message, Task
from ...environments.environment import Shown, Step


class SudokuEnvironment:
    """One puzzle of `sudokus`: an answer is a row, a column and a digit, from 1 on.

    Each right digit is worth its share of the blanks, so that a whole solution is worth 1. A wrong
    one is said to be wrong, and stays out; after `most_wrong` of them it ends.
    """

    def __init__(self, *, most_wrong: int = 3) -> None:
        self._most_wrong, self._wrong, self._blanks = most_wrong, 0, 0
        self._grid: list[list[int]] = []
        self._solution: Sequence[Sequence[int]] = []

    async def reset(self, task: Task) -> Shown:
        """Begin; the puzzle is the task's prompt."""
        message = task.metadata or {}
        if not {"puzzle", "solution"} <= message.keys():
            raise JobError(f"task {task.task_id} has no puzzle; make tasks by `sudokus`")
        self._grid = [list(row) for row in message["puzzle"]]
        self._solution, self._wrong = message["solution"], 0
        self._blanks = sum(digit == 0 for row in self._grid for digit in row)
        return list(task.messages)

    async def step(self, answer: Message) -> Step:
        """Write a digit, if it is right."""
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
        return Step(shown=self._shown(), reward=1 / self._blanks, is_done=is_done)

    async def close(self) -> None:
        """Nothing is held."""

    def _no(self, why: str, metrics: dict[str, float]) -> Step:
        self._wrong += 1
        return Step(
            shown=f"{why}\n{self._shown()}",
            reward=0.0,
            is_done=self._wrong >= self._most_wrong,
            metrics=metrics,
        )

    def _shown(self) -> str:
        return "".join("".join(str(d or ".") for d in row) + "\n" for row in self._grid)


def sudoku(**parameters: Any) -> SudokuEnvironment:
    """A sudoku that is filled digit by digit, as `{sudoku: {most_wrong: 3}}`."""
    return SudokuEnvironment(**parameters)
