"""Tasks that need no download: sums, and an expert who often gets them wrong."""

from collections.abc import Iterable, Iterator

import numpy as np

from ..store import Task


def addition(
    *,
    low: int = 10,
    high: int = 99,
    held_out: int = 500,
    seed: int = 0,
    taskset: str = "addition",
) -> Iterator[Task]:
    """Yield all sums of two numbers from `low` to `high`; `held_out` random ones are for measuring.

    Answers have as many digits as the largest sum, so that their length tells nothing. Another
    `taskset` for sums of other numbers keeps them apart in one store.

    >>> tasks = list(addition(low=0, high=9, held_out=10))
    >>> len(tasks), sum(t.split == "eval" for t in tasks), tasks[17].prompt_text, tasks[17].answer
    (100, 10, '1+7=', '08')
    """
    width = len(str(2 * high))
    numbers = range(low, high + 1)
    sums = [(a, b) for a in numbers for b in numbers]
    held = set(np.random.default_rng(seed).permutation(len(sums))[:held_out].tolist())
    for i, (a, b) in enumerate(sums):
        split = "eval" if i in held else "train"
        yield Task.ask(f"{a}+{b}=", str(a + b).zfill(width), taskset=taskset, split=split)


def forgetful_answers(
    tasks: Iterable[Task], *, forget: float = 0.6, answers: int = 2, seed: int = 0
) -> Iterator[dict[str, object]]:
    """Yield an expert's answers to sums: with probability `forget` every carry is dropped.

    Each line has the task's question, the expert's answer, and whether that is right.

    >>> [line] = forgetful_answers([Task.ask("38+45=", "083")], forget=1.0, answers=1)
    >>> line["answer"], line["is_right"]
    ('073', False)
    """
    rng = np.random.default_rng(seed)
    for task in tasks:
        question = task.prompt_text or ""
        for _ in range(answers):
            right = str(task.answer)
            forgot = rng.random() < forget
            answer = without_carries(question).zfill(len(right)) if forgot else right
            yield {"question": question, "answer": answer, "is_right": answer == right}


def without_carries(question: str) -> str:
    """Add column by column, and forget what is carried.

    >>> without_carries("38+45="), without_carries("67+52=")
    ('73', '19')
    """
    a, b = question.rstrip("=").split("+")
    width = max(len(a), len(b))
    columns = zip(a.zfill(width), b.zfill(width), strict=True)
    return "".join(str((int(x) + int(y)) % 10) for x, y in columns)
