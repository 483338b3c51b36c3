"""Squares to count in pictures: tasks that cannot be solved blind, and an expert who overcounts."""

import base64
import io
from collections.abc import Iterator, Sequence

import numpy as np

from ....store import Experience, Task
from ....store.errors import missing_extra
from .sums import answered

COLORS = {"r": (220, 40, 40), "g": (40, 200, 60), "b": (60, 80, 230)}
_CELL = 8
"""Pixels of a square's side: one token of a model with patches of 4."""


def squares(
    *,
    tasks: int = 800,
    held_out: int = 100,
    side: int = 3,
    most: int = 3,
    seed: int = 0,
    taskset: str = "squares",
) -> Iterator[Task]:
    """Yield pictures with red and green squares, and the question how many there are of a color.

    Counts are uniform from 0 to `most`, whatever the color, so that no question says anything of
    its answer. Pictures have `side` x `side` places. `held_out` more tasks have the split `eval`;
    the taskset `NAME_shuffled` asks the same of each other's pictures.

    >>> made = list(squares(tasks=2, held_out=3))
    >>> [(t.taskset, t.split) for t in made][-1], made[0].prompt_text in ("r=", "g=")
    (('squares_shuffled', 'eval'), True)
    """
    rng = np.random.default_rng(seed)
    held: list[tuple[str, str, str]] = []
    for i in range(tasks + held_out):
        places = rng.permutation(side * side)
        counts = rng.integers(0, most + 1, 2)
        drawn = dict(zip("rg", np.split(places[: counts.sum()], [counts[0]]), strict=True))
        color = "rg"[rng.integers(2)]
        url, answer = _picture(drawn, side, rng), str(len(drawn[color]))
        split = "train" if i < tasks else "eval"
        yield _asked(url, color, answer, taskset=taskset, split=split)
        if split == "eval":
            held.append((url, color, answer))
    for i, (_, color, answer) in enumerate(held):
        other = held[(i + 1) % len(held)][0]
        yield _asked(other, color, answer, taskset=f"{taskset}_shuffled", split="eval")


def _asked(url: str, color: str, answer: str, *, taskset: str, split: str) -> Task:
    image = {"type": "image_url", "image_url": {"url": url}}
    content = [image, {"type": "text", "text": f"{color}="}]
    message = {"role": "user", "content": content}
    return Task(messages=[message], answer=answer, taskset=taskset, split=split)


def _picture(drawn: dict[str, np.ndarray], side: int, rng: np.random.Generator) -> str:
    """Return a picture as a data URL."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("pillow", "vision") from error
    pixels = np.zeros((side, side, 3), np.int64)
    for color, places in drawn.items():
        shades = rng.integers(-30, 31, (len(places), 3))
        pixels[places // side, places % side] = np.array(COLORS[color]) + shades
    small = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    file = io.BytesIO()
    small.resize((side * _CELL, side * _CELL), Image.Resampling.NEAREST).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def overcounts(
    tasks: Sequence[Task], *, right: float = 0.35, answers: int = 2, seed: int = 0
) -> dict[str, list[Experience]]:
    """Return the answers of an expert who counts one too many, but for a share that is `right`.

    >>> [task] = squares(tasks=1, held_out=0)
    >>> rows = overcounts([task], right=0.0, answers=1)["experiences"]
    >>> int(str(rows[0].response_text)) - int(str(task.answer))
    1
    """
    rng = np.random.default_rng(seed)
    rows = []
    for task in tasks:
        for i in range(answers):
            count = int(str(task.answer)) + (rng.random() >= right)
            group = f"squares/{task.task_id}"
            rows.append(answered(task, str(count), group=group, name=str(i), rollout=i))
    return {"experiences": rows}
