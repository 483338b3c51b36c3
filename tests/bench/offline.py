"""Figures of SFT and DPO on stored rows, ours and TRL's.

Both train the same model from the same weights on the same texts, in a process of their own, one
after the other in turns. Ours also draws from the store, records each draw and packs the rows; TRL
pads them, since its packing needs flash attention. The reference of DPO is run in each step.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from .figure import Bench, Figure
from .grpo import ALPHABET, RATE, Clock, in_turns, settings

STEPS, WARM_UP = 24, 8


@dataclass(frozen=True)
class Work:
    """What both train on."""

    algorithm: str
    rows: int = 32
    """Rows or pairs of a step."""
    hidden: int = 256
    layers: int = 4

    @property
    def name(self) -> str:
        """The algorithm."""
        return self.algorithm

    def model(self) -> dict[str, Any]:
        """Return the model, as our configuration names it."""
        shape = {"hidden_size": self.hidden, "layers": self.layers, "heads": 4, "init_std": 0.04}
        return shape | {"max_length": 320, "alphabet": ALPHABET}

    def lines(self) -> list[dict[str, str]]:
        """Return as many rows as the steps take; their lengths have a long tail."""
        import numpy as np

        rng = np.random.default_rng(0)
        answers = ("completion",) if self.algorithm == "sft" else ("chosen", "rejected")

        def text(length: int) -> str:
            return "".join(rng.choice(list(ALPHABET), length))

        def answer() -> str:
            return text(int(np.clip(rng.lognormal(4.0, 0.7), 8, 256)))

        return [
            {"prompt": text(24)} | {name: answer() for name in answers}
            for _ in range(self.rows * STEPS)
        ]


def ours(work: Work, folder: Path) -> dict[str, float]:
    """Train with rlake."""
    from rlake.loop.config import build
    from rlake.loop.run import train
    from rlake.store import connect
    from rlake.store.files import import_file

    store, clock, file = connect(folder / "store"), Clock(), folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, work.lines())))
    if work.algorithm == "sft":
        names = "SELECT prompt AS prompt_text, completion AS response_text FROM input"
        import_file(store, file, "experiences", sql=names)
    else:
        import_file(store, file, "preferences")
    config = build(
        {
            "name": "bench",
            "threads": int(os.environ["OMP_NUM_THREADS"]),
            "model": {"from_scratch": work.model()},
            "algorithm": work.algorithm,
            "trainer": {
                "steps": STEPS,
                "batch_size": work.rows,
                "learning_rate": RATE,
                "checkpoint_every": 1000,
            },
        }
    )
    train(store, config, listener=lambda *_: clock.note())
    return clock.taken(WARM_UP)


def theirs(work: Work, folder: Path) -> dict[str, float]:
    """Train with TRL."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from rlake.loop.config import TinyModel
    from rlake.loop.models.load import make_tiny

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model, tokenizer = make_tiny(TinyModel(**work.model()), seed=0)
    start, clock = str(folder / "start"), Clock()
    model.save_pretrained(start)  # DPO loads its reference from there

    class Notes(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.note()

    kinds: dict[str, tuple[Any, Any]] = {
        "sft": (SFTTrainer, SFTConfig),
        "dpo": (DPOTrainer, DPOConfig),
    }
    trainer, form = kinds[work.algorithm]
    trained = trainer(
        start,
        args=form(max_length=None, **settings(folder, rows=work.rows, max_steps=STEPS)),
        train_dataset=Dataset.from_list(work.lines()),
        processing_class=tokenizer,
        callbacks=[Notes()],
    )
    trained.train()
    return clock.taken(WARM_UP)


SIDES = {"ours": ours, "theirs": theirs}


def offline(bench: Bench) -> Iterator[Figure]:
    """Compare tokens a second of SFT and DPO with TRL's."""
    for work in (Work("sft"), Work("dpo")):
        found = in_turns(__name__, work, bench.folder, threads=1)
        for what in ("cpu", "wall"):
            middle = {side: median(t[what] for t in taken) for side, taken in found.items()}
            yield Figure(
                f"{work.algorithm}_tokens_{what}",
                round(middle["theirs"] / middle["ours"], 2),
                "of TRL's",
                1.3,
                f"{work.rows} rows of 24 + 8-256 tokens (log-normal), Qwen3 of {work.layers} "
                f"layers of {work.hidden}, float32, 1 thread; {what} seconds a step: "
                f"{middle['ours']:.3f} and {middle['theirs']:.3f}; medians of turns",
            )
