"""Additions and digits to sort: tasks, a reward, and an expert's answers."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import numpy as np

from ....store import Experience, Task


def addition(
    *, low: int = 10, high: int = 99, held_out: int = 500, seed: int = 0, taskset: str = "addition"
) -> Iterator[Task]:
    """Yield all sums of two numbers from `low` to `high`; `held_out` random ones have split `eval`.

    Answers have as many digits as the largest sum, so that their length carries no information.

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


def mixed_sums(
    *,
    digits: Sequence[int] = (1, 2, 3),
    each: int = 100,
    seed: int = 0,
    taskset: str = "mixed_sums",
) -> Iterator[Task]:
    """Yield `each` random sums of numbers with each number of digits.

    `digits` is also in the metadata; the answer has one digit more.

    >>> [t.answer and len(t.answer) for t in mixed_sums(digits=(1, 3), each=1)]
    [2, 4]
    """
    rng = np.random.default_rng(seed)
    for size in digits:
        ends = 10**size
        pairs = rng.choice(ends * ends, min(each, ends * ends), replace=False)
        for a, b in (divmod(int(pair), ends) for pair in pairs):
            question, answer = f"{a:0{size}}+{b:0{size}}=", str(a + b).zfill(size + 1)
            yield Task.ask(question, answer, taskset=taskset, metadata={"digits": size})


def unsorted_digits(
    *,
    digits: int = 4,
    longest: int = 3,
    held_out: int = 20,
    seed: int = 0,
    taskset: str = "unsorted_digits",
) -> Iterator[Task]:
    """Yield every sequence of up to `longest` of the first `digits` digits, to be sorted.

    A tiny model learns this from scratch in seconds with the reward `share_right`. `held_out`
    random ones have the split `eval`.

    >>> tasks = list(unsorted_digits(digits=3, longest=2, held_out=2))
    >>> len(tasks), tasks[9].prompt_text, tasks[9].answer, sum(t.split == "eval" for t in tasks)
    (12, '20=', '02', 2)
    """
    names = "0123456789"[:digits]
    asked = ["".join(p) for n in range(1, longest + 1) for p in product(names, repeat=n)]
    held = set(np.random.default_rng(seed).permutation(len(asked))[:held_out].tolist())
    for i, question in enumerate(asked):
        split = "eval" if i in held else "train"
        answer = "".join(sorted(question))
        yield Task.ask(f"{question}=", answer, taskset=taskset, split=split)


def share_right(task: Task, experience: Experience) -> float | None:
    """Return the share of characters that are right and in the right position.

    >>> share_right(Task.ask("301=", "013"), Experience(task_id="t", response_text="01"))
    0.6666666666666666
    """
    if task.answer is None:
        return None
    said = experience.response_text or ""
    right = sum(a == b for a, b in zip(said, task.answer, strict=False))
    return right / max(len(said), len(task.answer), 1)


def answered(
    task: Task, text: str, *, group: str, name: str, rollout: int, source: str = "expert"
) -> Experience:
    """Return an answer to a task as a row of text with the reward `share_right`.

    >>> row = answered(Task.ask("20=", "02"), "02", group="g", name="0", rollout=0)
    >>> row.experience_id, row.reward, row.source
    ('g/0', 1.0, 'expert')
    """
    row = Experience(
        task_id=task.task_id,
        group_id=group,
        experience_id=f"{group}/{name}",
        rollout_index=rollout,
        messages=[*task.messages, {"role": "assistant", "content": text}],
        prompt_text=task.prompt_text,
        response_text=text,
        source=source,
        num_turns=1,
    )
    return row.with_reward({"share_right": share_right(task, row)})


def forgetful_answers(
    tasks: Iterable[Task], *, forget: float = 0.6, answers: int = 2, seed: int = 0
) -> Iterator[dict[str, object]]:
    """Yield an expert's answers to sums: with probability `forget` every carry is dropped.

    Each line has the task's question, the expert's answer, and whether it is right.

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
    """Add column by column, without carries.

    >>> without_carries("38+45="), without_carries("67+52=")
    ('73', '19')
    """
    a, b = question.rstrip("=").split("+")
    width = max(len(a), len(b))
    columns = zip(a.zfill(width), b.zfill(width), strict=True)
    return "".join(str((int(x) + int(y)) % 10) for x, y in columns)
