"""Figures of whole GRPO runs, ours and TRL's: sampling, rewards, advantages and updates.

Both train the same model from the same weights on the same questions, strictly on policy, in a
process of their own, one after the other in turns. Ours also stores every task, rollout and draw,
and publishes every version. Times are those of a step after the first few: CPU seconds, which
what else the machine does hardly changes, and seconds. Both may use as many threads as
OMP_NUM_THREADS says; ours leaves the number that torch uses to its default.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from time import perf_counter, process_time
from typing import Any

from .figure import Bench, Figure, say, told

TURNS = 3
RATE = 1e-6
"""So small that answers stay as long as they are."""
ALPHABET = "0123456789+="
LONG_ALPHABET = ALPHABET + "".join(map(chr, range(0x4E00, 0x4E00 + 1000)))
"""So many characters that the end is rarely sampled: most answers are as long as they may be."""


@dataclass(frozen=True)
class Work:
    """What both train on."""

    name: str
    groups: int
    rollouts: int
    new_tokens: int
    hidden: int
    layers: int
    steps: int
    warm_up: int
    terms: int = 2
    """Numbers of an addition: a prompt has two characters for each."""
    alphabet: str = ALPHABET

    @property
    def told(self) -> str:
        """What it is, in words."""
        return (
            f"{self.groups} prompts of {2 * self.terms} tokens x {self.rollouts} answers of at "
            f"most {self.new_tokens}, Qwen3 of {self.layers} layers of {self.hidden}, float32, on "
            "policy"
        )

    def model(self) -> dict[str, Any]:
        """Return the model, as our configuration names it."""
        return {
            "hidden_size": self.hidden,
            "layers": self.layers,
            "heads": 4,
            "init_std": 0.06,
            "max_length": 2 * self.terms + self.new_tokens + 8,
            "alphabet": self.alphabet,
        }

    def questions(self) -> list[str]:
        """Return as many questions as the steps ask."""
        import numpy as np

        digits = np.random.default_rng(0).integers(0, 10, (self.groups * self.steps, self.terms))
        return ["+".join(map(str, row)) + "=" for row in digits.tolist()]


SMALL = Work("tiny", groups=32, rollouts=8, new_tokens=8, hidden=96, layers=2, steps=40, warm_up=8)
LARGER = Work(
    "256",
    groups=16,
    rollouts=4,
    new_tokens=128,
    hidden=256,
    layers=4,
    steps=4,
    warm_up=1,
    terms=64,
    alphabet=LONG_ALPHABET,
)


class Clock:
    """Notes the time at the end of each step."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, float]] = []

    def note(self) -> None:
        """A step has ended."""
        self._ends.append((process_time(), perf_counter()))

    def taken(self, warm_up: int) -> dict[str, float]:
        """Return the CPU seconds and seconds of a step, in the mean of those after the first."""
        (cpu, wall), (last_cpu, last_wall) = self._ends[warm_up - 1], self._ends[-1]
        steps = len(self._ends) - warm_up
        return {"cpu": (last_cpu - cpu) / steps, "wall": (last_wall - wall) / steps}


def ours(work: Work, folder: Path) -> dict[str, float]:
    """Train with rlake."""
    from rlake.loop.config import build
    from rlake.loop.run import run
    from rlake.store import Task, connect

    store, clock = connect(folder / "store"), Clock()
    store.append("tasks", [Task.ask(question) for question in work.questions()])
    sampling = {"max_tokens": work.new_tokens, "temperature": 1.0}
    config = build(
        {
            "name": "bench",
            "model": {"from_scratch": work.model()},
            "algorithm": "grpo",
            "schedule": "on_policy",
            "explorer": {
                "rewards": f"{__name__}:share_of_even",
                "group_size": work.rollouts,
                "sampling": sampling,
            },
            "trainer": {
                "steps": work.steps,
                "batch_size": work.groups,
                "learning_rate": RATE,
                "checkpoint_every": 1000,
            },
        }
    )
    run(store, config, listener=lambda job, *_: clock.note() if job == "train" else None)
    [(tokens,)] = store.sql(
        "SELECT avg(len(token_ids) - prompt_length) FROM experiences"
    ).fetchall()
    return clock.taken(work.warm_up) | {"tokens": tokens}


def theirs(work: Work, folder: Path) -> dict[str, float]:
    """Train with TRL."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from rlake.loop.config import TinyModel
    from rlake.loop.models.load import make_tiny

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model, tokenizer = make_tiny(TinyModel(**work.model()), seed=0)
    clock, lengths = Clock(), []

    def reward(completions: Sequence[str], **rest: Any) -> list[float | None]:
        lengths.extend(map(len, rest["completion_ids"]))
        return [*map(_share, completions)]

    class Notes(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.note()

    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        args=GRPOConfig(
            num_generations=work.rollouts,
            max_completion_length=work.new_tokens,
            beta=0.0,
            loss_type="grpo",
            **settings(folder, rows=work.groups * work.rollouts, max_steps=work.steps),
        ),
        train_dataset=Dataset.from_dict({"prompt": work.questions()}),
        processing_class=tokenizer,
        callbacks=[Notes()],
    )
    trainer.train()
    return clock.taken(work.warm_up) | {"tokens": sum(lengths) / len(lengths)}


def settings(folder: str | Path, *, rows: int, **others: Any) -> dict[str, Any]:
    """Return the settings of TRL's trainers for training alone, on a CPU in float32."""
    return {
        "output_dir": str(folder),
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": rows,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **others,
    }


def share_of_even(task: Any, row: Any) -> float:
    """Reward characters of even numbers: the rewards of a group differ, so it is trained on."""
    del task
    return _share(row.response_text)


def _share(answer: str) -> float:
    return sum(ord(one) % 2 == 0 for one in answer) / max(1, len(answer))


SIDES = {"ours": ours, "theirs": theirs}


def measured(module: str, side: str, work: Any, folder: Path, threads: int) -> dict[str, float]:
    """Train in a process of its own."""
    call = (
        "import json; from pathlib import Path; "
        f"from {module} import SIDES, Work; "
        f"print(json.dumps(SIDES[{side!r}]({work!r}, Path({str(folder)!r}))))"
    )
    path = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(Path(__file__).parents[1])}
    return told([call], f"a run of {side}", env=os.environ | path)


def in_turns(
    module: str, work: Any, folder: Path, threads: int
) -> dict[str, list[dict[str, float]]]:
    """Train in turns with both sides of a module; return what each run took."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(TURNS):
        for side, taken in found.items():
            taken.append(measured(module, side, work, Path(mkdtemp(dir=folder)), threads))
            say(f"{work.name}, {threads} threads, {side}: {json.dumps(taken[-1])}")
    return found


def grpo(bench: Bench) -> Iterator[Figure]:
    """Compare whole runs with TRL's: a tiny model, and a larger one with longer texts."""
    for work in (SMALL, LARGER):
        for threads in (1, 2):
            yield from compared(work, bench.folder, threads)


def compared(work: Work, folder: Path, threads: int) -> Iterator[Figure]:
    """Train in turns, and say how the times of a step compare."""
    found = in_turns(__name__, work, folder, threads)
    for what in ("cpu", "wall"):
        middle = {side: median(t[what] for t in taken) for side, taken in found.items()}
        lengths = " and ".join(f"{taken[0]['tokens']:.1f}" for taken in found.values())
        yield Figure(
            f"grpo_{work.name}_{threads}_{what}",
            round(middle["ours"] / middle["theirs"], 2),
            "of TRL's",
            0.8 if work is SMALL else 0.9,
            f"{work.told}, {threads} threads; {what} seconds a step: {middle['ours']:.3f} and "
            f"{middle['theirs']:.3f}; {lengths} tokens an answer; medians of {TURNS} in turns",
        )
