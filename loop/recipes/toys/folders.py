"""Small folders of notes, lists and logs, and what somebody wants done in them with bash."""

from collections.abc import Iterator

import numpy as np

from ....store import Task

_WORDS = ("apple", "bread", "candle", "dough", "egg", "flour", "grape", "honey", "ink", "jam")
_NAMES = ("garden", "kitchen", "office", "school", "travel")
_WANTED = (
    ("How many lines has {a}.txt?", "wc -l < {a}.txt"),
    ("Print the lines of {a}.txt in the order of the alphabet.", "sort {a}.txt"),
    ("Print the first line of {a}.txt.", "head -n 1 {a}.txt"),
    ("Print the last line of {a}.txt.", "tail -n 1 {a}.txt"),
    ("Which files have the word {w}? Print their names.", "grep -lw {w} *.txt"),
    ("How many files are in the folder logs?", "ls logs | wc -l"),
    ("Delete {a}.txt.", "rm {a}.txt"),
    ("Copy {a}.txt to {b}.bak.", "cp {a}.txt {b}.bak"),
    ("Rename {a}.txt to {w}.txt.", "mv {a}.txt {w}.txt"),
    ("Move all files of logs to a new folder {w}.", "mkdir {w} && mv logs/* {w}"),
    ("Write {w} in place of {v} in {a}.txt.", "sed -i s/{v}/{w}/g {a}.txt"),
    ("Write the lines of {a}.txt, sorted, to {w}.txt.", "sort {a}.txt > {w}.txt"),
    ("Delete the empty files of logs.", "find logs -type f -empty -delete"),
)


def folder_chores(
    *, count: int = 200, held_out: int = 40, seed: int = 0, taskset: str = "chores"
) -> Iterator[Task]:
    """Yield tasks for the environment `bash`; the first `held_out` have the split `eval`.

    >>> task = next(folder_chores())
    >>> task.prompt_text, task.answer
    ('Write the lines of school.txt, sorted, to dough.txt.', 'sort school.txt > dough.txt')
    """
    rng = np.random.default_rng(seed)
    made: dict[str, Task] = {}
    while len(made) < count:
        a, b = (str(name) for name in rng.choice(_NAMES, 2, replace=False))
        lists = {n: [str(w) for w in rng.choice(_WORDS, rng.integers(2, 6))] for n in _NAMES}
        v = lists[a][0]
        w = str(rng.choice([word for word in _WORDS if word not in (v, *_NAMES)]))
        asked, right = _WANTED[int(rng.integers(len(_WANTED)))]
        names = {"a": a, "b": b, "v": v, "w": w}
        files = {f"{name}.txt": "".join(f"{w}\n" for w in words) for name, words in lists.items()}
        logs = {f"logs/{i}.log": "done\n" * int(rng.integers(2)) for i in range(rng.integers(1, 5))}
        prompt = asked.format(**names)
        split = "eval" if len(made) < held_out else "train"
        about = {"bash": {"files": {**files, **logs}}}
        task = Task.ask(prompt, right.format(**names), taskset=taskset, split=split, metadata=about)
        # the same words in another folder would be a task of both splits
        made.setdefault(prompt, task)
    yield from made.values()
