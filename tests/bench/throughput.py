"""Figures of training steps, ours and those of TRL: same model, rows, threads, and the same loss.

What is timed is a step on given rows: from lists of tokens to the changed weights, with the
reference policy's pass for DPO, and with the policy's log-probs given for GRPO. TRL takes its own
collator, four rows (two pairs) at a time; we take as many tokens at a time as it does at most.
Times are CPU seconds on one thread; memory is what a process holds at most, the model left out.
"""

import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import polars as pl

from rlake.store.errors import JobError

from .figure import Bench, Figure, told
from .grpo import settings

ALGORITHMS = ("sft", "dpo", "grpo")
ROWS, AT_ONCE = 16, 4
RATE = 1e-4
REPEAT = 3


@dataclass(frozen=True)
class Work:
    """What both take a step on."""

    algorithm: str
    vocabulary: int
    hidden: int = 128
    layers: int = 2
    longest: int = 512
    """Most tokens of a row."""

    @property
    def told(self) -> str:
        """What it is, in words."""
        return (
            f"{self.algorithm}, {ROWS} rows of 64-{self.longest} tokens, Qwen3 of {self.layers} "
            f"layers of {self.hidden}, {self.vocabulary} tokens, float32"
        )

    @property
    def at_once(self) -> int:
        """The most tokens, padding included, of four rows that follow each other."""
        lengths = self.rows()["token_ids"].list.len().to_list()
        return max(AT_ONCE * max(lengths[i : i + AT_ONCE]) for i in range(0, ROWS, AT_ONCE))

    def model(self) -> Any:
        """Return the model that the step starts from."""
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=self.hidden // 4,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        return Qwen3ForCausalLM(config)

    def rows(self) -> pl.DataFrame:
        """Return rows: pairs and groups have the same prompt."""
        rng = np.random.default_rng(0)
        size = {"sft": 1, "dpo": 2, "grpo": 8}[self.algorithm]
        lengths = rng.integers(32, self.longest * 3 // 8, ROWS // size)
        prompts = [rng.integers(3, self.vocabulary, n) for n in lengths]
        made = []
        for i in range(ROWS):
            prompt = prompts[i // size]
            length = int(rng.integers(32, self.longest + 1 - len(prompt)))
            tokens = [*prompt.tolist(), *rng.integers(3, self.vocabulary, length).tolist()]
            old = -np.log(self.vocabulary) + rng.normal(0, 0.1, len(tokens))
            made.append(
                {
                    "experience_id": f"e{i}",
                    "prompt_length": len(prompt),
                    "token_ids": tokens,
                    "loss_mask": [False] * len(prompt) + [True] * length,
                    "logprobs": old.tolist(),
                    "advantage": float(rng.normal()),
                    "weight": 1.0,
                    "unit": i // 2 if size == 2 else i,
                }
            )
        return pl.DataFrame(made)


Step = Callable[[], float]
"""Takes a step, and returns the loss before it."""


def ours(work: Work) -> Step:
    """Return our step."""
    from rlake.loop.algorithms import resolve
    from rlake.loop.config import TrainerConfig
    from rlake.loop.losses.batch import examples
    from rlake.loop.trainer.networks import Networks, frozen
    from rlake.loop.trainer.step import Updater

    algorithm, rows, model = resolve(work.algorithm), work.rows(), work.model()
    networks = Networks(model)
    if "reference" in algorithm.needs:
        networks.reference = frozen(copy.deepcopy(model))
    config = TrainerConfig(learning_rate=RATE, micro_batch_tokens=work.at_once)
    optimization = Updater(networks, algorithm, config, total_steps=100, temperature=1.0, pad_id=0)

    def step() -> float:
        taken = optimization.step(examples(rows, needs=algorithm.needs))
        return taken.metrics["train/loss"]

    return step


def theirs(work: Work, *, sort: bool = False) -> Step:
    """Return TRL's step; sorted, rows of like length go together, which it can do for SFT."""
    trainer, features = _TRAINERS[work.algorithm](work)
    if sort:
        features = sorted(features, key=lambda row: -len(row["input_ids"]))
    each = AT_ONCE // 2 if work.algorithm == "dpo" else AT_ONCE
    parts = [features[i : i + each] for i in range(0, len(features), each)]
    trained = sum(sum(label != -100 for label in row.get("labels", ())) for row in features)
    trainer.current_gradient_accumulation_steps = len(parts)
    trainer.create_optimizer()
    trainer.model.train()

    def step() -> float:
        loss = 0.0
        for part in parts:
            inputs = trainer.data_collator(part)
            counted = trained if work.algorithm == "sft" else None
            if work.algorithm == "grpo":
                counted = 1  # the loss of a micro-batch is divided by how many there are already
            loss += float(trainer.training_step(trainer.model, inputs, counted))
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return loss

    return step


def _settings() -> dict[str, Any]:
    return settings(
        tempfile.mkdtemp(prefix="rlake-bench-"),
        rows=AT_ONCE,
        learning_rate=RATE,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_accumulation_steps=ROWS // AT_ONCE,
    )


def _tokenizer() -> Any:
    from rlake.loop.models.load import character_tokenizer

    return character_tokenizer("abcdefgh")


def _sft(work: Work) -> tuple[Any, list[Any]]:
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    features = [
        {
            "input_ids": row["token_ids"],
            "labels": [
                t if m else -100 for t, m in zip(row["token_ids"], row["loss_mask"], strict=True)
            ],
        }
        for row in work.rows().to_dicts()
    ]
    config = SFTConfig(
        **_settings(), max_length=None, dataset_kwargs={"skip_prepare_dataset": True}
    )
    trainer = SFTTrainer(
        work.model(),
        args=config,
        train_dataset=Dataset.from_list(features),
        processing_class=_tokenizer(),
    )
    return trainer, features


def _dpo(work: Work) -> tuple[Any, list[Any]]:
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    rows = work.rows().to_dicts()
    features = []
    for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
        n = chosen["prompt_length"]
        features.append(
            {
                "prompt_ids": chosen["token_ids"][:n],
                "chosen_ids": chosen["token_ids"][n:],
                "rejected_ids": rejected["token_ids"][n:],
            }
        )
    given = _settings()
    given["per_device_train_batch_size"] = AT_ONCE // 2
    config = DPOConfig(**given, beta=0.1)
    texts = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    model = work.model()
    trainer = DPOTrainer(
        model,
        ref_model=copy.deepcopy(model),
        args=config,
        train_dataset=texts,
        processing_class=_tokenizer(),
    )
    return trainer, features


def _grpo(work: Work) -> tuple[Any, list[Any]]:
    import torch
    from datasets import Dataset
    from torch.nn.utils.rnn import pad_sequence
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    config = GRPOConfig(**_settings(), loss_type="grpo", beta=0.0, num_generations=AT_ONCE)
    trainer = GRPOTrainer(
        work.model(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
        processing_class=_tokenizer(),
    )

    def collate(rows: list[Any]) -> dict[str, Any]:
        """Do what its generation does with tokens: prompts padded on the left, answers right."""
        tokens = [torch.tensor(row["token_ids"]) for row in rows]
        starts = [row["prompt_length"] for row in rows]
        prompts = [t[:n] for t, n in zip(tokens, starts, strict=True)]
        answers = [t[n:] for t, n in zip(tokens, starts, strict=True)]
        old = [torch.tensor(r["logprobs"])[n:] for r, n in zip(rows, starts, strict=True)]

        def right(parts: list[Any]) -> Any:
            return pad_sequence(parts, batch_first=True)

        def left(parts: list[Any]) -> Any:
            return pad_sequence(parts, batch_first=True, padding_side="left")

        return {
            "prompt_ids": left(prompts),
            "prompt_mask": left([torch.ones_like(p) for p in prompts]),
            "completion_ids": right(answers),
            "completion_mask": right([torch.ones_like(a) for a in answers]),
            "old_per_token_logps": right(old).float(),
            "advantages": torch.tensor([row["advantage"] for row in rows]),
        }

    trainer.data_collator = collate
    setattr(trainer, "_prepare_inputs", lambda inputs: inputs)  # noqa: B010 - else it generates
    return trainer, work.rows().to_dicts()


_TRAINERS: dict[str, Callable[[Work], tuple[Any, list[Any]]]] = {
    "sft": _sft,
    "dpo": _dpo,
    "grpo": _grpo,
}


def memory(side: str, work: Work) -> float:
    """Return how many MB three steps add at most to what a process holds before them."""
    import torch

    torch.set_num_threads(1)
    make = ours if side == "ours" else theirs
    make(replace(work, longest=96, hidden=16, vocabulary=64))()  # loads what is loaded once
    step = make(work)
    before = _status("VmRSS")
    for _ in range(3):
        step()
    return _status("VmHWM") - before


def _status(name: str) -> float:
    """Return what the kernel says of this process, in MB; a parent's peak does not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def _elsewhere(side: str, work: Work) -> float:
    """Measure in a process of its own, whose allocator gives back what is free at once."""
    call = f"from {__name__} import Work, memory; print(memory({side!r}, {work!r}))"
    path = {"MALLOC_MMAP_THRESHOLD_": str(2**18), "PYTHONPATH": str(Path(__file__).parents[1])}
    return told([call], f"a step of {side}", env=os.environ | path)


def throughput(bench: Bench) -> Iterator[Figure]:
    """Compare training steps with TRL's, at a vocabulary of letters and at one of a language."""
    import torch

    del bench
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that what else the machine does is not measured
    for algorithm in ALGORITHMS:
        yield from compared(Work(algorithm, 128))
        yield from compared(Work(algorithm, 32_000, hidden=64, longest=256))
    torch.set_num_threads(threads)


def compared(work: Work) -> Iterator[Figure]:
    """Take steps in turns, and say how the losses, times and memories compare."""
    sides = {"ours": ours(work), "theirs": theirs(work)}
    if work.algorithm == "sft":
        sides["sorted"] = theirs(work, sort=True)
    first = {name: step() for name, step in sides.items()}
    second = {name: step() for name, step in sides.items()}
    apart = max(abs(first[n] - first["ours"]) for n in first)
    if apart > 1e-4 or max(abs(second[n] - second["ours"]) for n in second) > 1e-3:
        raise JobError(f"the steps are not the same work: {work.told}; {first}; {second}")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(REPEAT):
        for name, step in sides.items():
            began = process_time()
            step()
            seconds[name].append(process_time() - began)
    middle = {name: median(taken) for name, taken in seconds.items()}
    tokens = int(work.rows()["token_ids"].list.len().sum())
    name = f"throughput_{work.algorithm}_{work.vocabulary}"
    loss = f"first losses {first['ours']:.5f} and {first['theirs']:.5f}"
    rate = f"{tokens / middle['ours']:.0f} and {tokens / middle['theirs']:.0f} tokens/s"
    wanted = f"{work.told}; {rate}; {loss}; 1.3 or more wanted; medians of {REPEAT} in turns"
    ratio, unit = round(middle["theirs"] / middle["ours"], 2), "x TRL's tokens/s"
    yield Figure(name, ratio, unit, None, wanted)
    if "sorted" in middle:
        ratio = round(middle["sorted"] / middle["ours"], 2)
        what = f"{work.told}; TRL with rows of like length together"
        yield Figure(f"{name}_sorted", ratio, unit, None, what)
    held = {side: _elsewhere(side, work) for side in ("ours", "theirs")}
    what = f"{work.told}; {held['ours']:.0f} and {held['theirs']:.0f} MB above the model"
    share = round(held["ours"] / held["theirs"], 2)
    yield Figure(f"memory_{work.algorithm}_{work.vocabulary}", share, "of TRL's", 1.0, what)
