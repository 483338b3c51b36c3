"""GSM8K's files: those in the folder `RLAKE_DATA`, or else generated ones of the same shape.

Nothing is downloaded, and the files are imported like any others.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_NAMES = ("Ada", "Ben", "Chloe", "Dev", "Elif", "Femi", "Grace", "Hugo", "Ines", "Jun")
_THINGS = ("eggs", "pencils", "apples", "stickers", "marbles", "books", "candles", "tickets")
_OPENINGS = ("There are", "In all boxes together there are", "First count them:")
_SKILLS = {
    "6b_finetuning": 0.3,
    "6b_verification": 0.4,
    "175b_finetuning": 0.35,
    "175b_verification": 0.55,
}
"""Skill of each model of the stand-in; the keys are those of the real file."""


@dataclass(frozen=True)
class Files:
    """The folder of the three files, and whether they are GSM8K's own."""

    folder: Path
    is_real: bool

    @property
    def train(self) -> Path:
        """Questions with a person's solution, whose last line is like `#### 72`."""
        return self.folder / "train.jsonl"

    @property
    def test(self) -> Path:
        """Held-out questions with solutions."""
        return self.folder / "test.jsonl"

    @property
    def solutions(self) -> Path:
        """Four models' solutions of each test question, and whether each is right."""
        return self.folder / "example_model_solutions.jsonl"

    def __str__(self) -> str:
        if self.is_real:
            return f"GSM8K, in {self.folder}"
        data = os.environ.get("RLAKE_DATA")
        reason = f"{Path(data) / 'gsm8k'} does not exist" if data else "RLAKE_DATA is not set"
        return (
            f"a generated stand-in for GSM8K, in {self.folder}: {reason}; set RLAKE_DATA to the "
            "folder that holds `gsm8k`"
        )


def real() -> Files | None:
    """Return GSM8K's own files in the folder `RLAKE_DATA`, or None if they do not exist."""
    data = os.environ.get("RLAKE_DATA")
    if not data:
        return None
    files = Files(Path(data).expanduser() / "gsm8k", is_real=True)
    there = all(path.is_file() for path in (files.train, files.test, files.solutions))
    return files if there else None


def find(stand_in: str | Path) -> Files:
    """Return GSM8K's own files, or write generated ones to the folder `stand_in`."""
    return real() or write_stand_in(stand_in)


def write_stand_in(
    folder: str | Path, *, train: int = 600, test: int = 400, seed: int = 0
) -> Files:
    """Write files of GSM8K's shape: made-up questions, and solutions of four made-up models.

    >>> files = write_stand_in(tmp, train=2, test=3)
    >>> [len(p.read_text().splitlines()) for p in (files.train, files.test, files.solutions)]
    [2, 3, 3]
    """
    files = Files(Path(folder), is_real=False)
    files.folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    problems: dict[str, _Problem] = {}
    while len(problems) < train + test:
        made = _Problem.random(rng)
        problems.setdefault(made.question, made)
    asked = list(problems.values())
    _write(files.train, (p.line() for p in asked[:train]))
    _write(files.test, (p.line() for p in asked[train:]))
    _write(files.solutions, (_solved(p, rng) for p in asked[train:]))
    return files


@dataclass(frozen=True)
class _Problem:
    """Some boxes of things, of which some are given away and the rest is sold."""

    who: str
    thing: str
    boxes: int
    each: int
    gone: int
    price: int

    @classmethod
    def random(cls, rng: np.random.Generator) -> "_Problem":
        boxes, each = int(rng.integers(2, 13)), int(rng.integers(3, 25))
        gone, price = int(rng.integers(1, boxes * each)), int(rng.integers(2, 10))
        return cls(str(rng.choice(_NAMES)), str(rng.choice(_THINGS)), boxes, each, gone, price)

    @property
    def question(self) -> str:
        return (
            f"{self.who} has {self.boxes} boxes of {self.each} {self.thing} each. {self.gone} of "
            f"the {self.thing} are given away, and the others are sold for ${self.price} each. "
            f"How many dollars do {self.who}\u2019s {self.thing} bring?"
        )

    def solve(self, opening: str, *, slip: int = 0, at: int = 0) -> tuple[str, int]:
        """Return the steps and the result, with the result of step `at` wrong by `slip`."""
        wrong = [slip if i == at else 0 for i in range(3)]
        total = self.boxes * self.each + wrong[0]
        left = total - self.gone + wrong[1]
        earned = left * self.price + wrong[2]
        steps = (
            f"{opening} {self.boxes} * {self.each} = <<{self.boxes}*{self.each}={total}>>{total} "
            f"{self.thing}.\n"
            f"After that {total} - {self.gone} = <<{total}-{self.gone}={left}>>{left} are left.\n"
            f"They bring {left} * {self.price} = $<<{left}*{self.price}={earned}>>{earned}."
        )
        return steps, earned

    def line(self) -> dict[str, str]:
        steps, result = self.solve(_OPENINGS[0])
        return {"question": self.question, "answer": f"{steps}\n#### {result}"}


def _solved(problem: _Problem, rng: np.random.Generator) -> dict[str, object]:
    steps, result = problem.solve(_OPENINGS[0])
    difficulty = rng.random()
    rollouts = {model: _try(problem, skill, difficulty, rng) for model, skill in _SKILLS.items()}
    return {"question": problem.question, "ground_truth": f"{steps}\nA: {result}", **rollouts}


def _try(
    problem: _Problem, skill: float, difficulty: float, rng: np.random.Generator
) -> dict[str, object]:
    # Wrong in one step if the problem is too difficult for the skill, or by bad luck.
    is_right = skill > 0.6 * difficulty + 0.4 * rng.random()
    slip = 0 if is_right else int(rng.choice([-10, -1, 1, 10]))
    opening = str(rng.choice(_OPENINGS))
    steps, result = problem.solve(opening, slip=slip, at=int(rng.integers(3)))
    return {"is_correct": is_right, "solution": f"{steps}\nA: {result}"}


def _write(path: Path, lines: Iterable[Mapping[str, object]]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
