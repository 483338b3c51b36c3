"""A step of an algorithm on ragged rows, to be taken in many ways."""

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import polars as pl
import pytest
import torch
from support.tiny_models import networks, tiny

from rlake.loop.algorithms import names, resolve
from rlake.loop.config import TrainerConfig
from rlake.loop.losses import Aggregation, PolicyGradient
from rlake.loop.losses.batch import Examples, examples
from rlake.loop.models.lm_head import LOGITS_BYTES
from rlake.loop.models.token_logprobs import token_logprobs
from rlake.loop.trainer.distributed.fsdp import shard, whole
from rlake.loop.trainer.distributed.world import MultiProcess, SingleProcess
from rlake.loop.trainer.step import Updater

LENGTHS = [5, 17, 9, 12, 7, 3, 17, 10, 6, 14]


WHOLE_STEP: dict[str, Any] = {
    "weights": {"grpo": {"correction": {"decoupled": True, "cap": 1.2, "half_life": 2.0}}},
    "masks": {"grpo": {"correction": {"mask": "sequence", "mask_below": 0.9, "mask_above": 1.6}}},
    "penalties": {"grpo": {"kl": {"coef": 0.5, "estimator": "corrected_k3"}, "entropy_coef": 0.1}},
    "charged": {"dr_grpo": {"norm": 11.0, "kl": {"coef": 0.5, "part_of": "reward"}}},
    "mixed": {"mix": {"kl": {"coef": 0.1}, "correction": {"weights": "sequence"}}},
    "returned": {
        "reinforce_plus_plus": {"discount": 0.9, "kl": {"coef": 0.5, "part_of": "reward"}}
    },
    "masked": {"grpo": {"dual_clip": 2.0, "sequence_mask": 0.01}},
    "repeated": {"grpo": {"repeat_groups": True}},
}
"""Penalties and corrections, which say things of the step as a whole."""


def variants() -> list[Any]:
    """Every packaged algorithm, each loss with every way to aggregate, and what all share."""
    cases = [pytest.param(spec, id=name) for name, spec in WHOLE_STEP.items()]
    for name in names():
        made = resolve(name)
        known = {f.name for f in fields(made)}  # type: ignore[arg-type]
        # one loss that many share is enough to show that it adds up in every way
        is_shared = name != "grpo" and type(made).loss is PolicyGradient.loss
        if "aggregation" not in known or is_shared:
            cases.append(pytest.param({name: {}}, id=name))
            continue
        for how in get_args(Aggregation):
            params = {"aggregation": how, "norm": 11.0 if how.endswith("norm") else None}
            cases.append(pytest.param({name: params}, id=f"{name}-{how}"))
    return cases


@cache
def rows_of_a_step(*, longer: int = 0) -> Examples:
    """Rows of many lengths, some tokens not trained on, sampled by a policy that is a bit older.

    Pairs are rows 0 and 1, 2 and 3 ...; groups likewise. `longer` adds tokens at the end of each
    row that are not trained on.
    """
    rng = np.random.default_rng(0)
    model, tokenizer = tiny()
    tokens = [rng.integers(3, len(tokenizer), n).tolist() for n in LENGTHS]
    masks = [[False, *(rng.random(n - 2) < 0.7).tolist(), True] for n in LENGTHS]
    logprobs, teachers = [], []
    with torch.no_grad():
        for row in tokens:
            true = token_logprobs(model, torch.tensor([row]))[0].numpy()
            logprobs.append((true + rng.normal(0, 0.3, len(row))).tolist())
            teachers.append((true + rng.normal(0, 0.3, len(row))).tolist())
    count = len(tokens)
    columns = {
        "experience_id": [f"e{i}" for i in range(count)],
        "token_ids": [[*t, *range(5, 5 + longer)] for t in tokens],
        "loss_mask": [[*m, *[False] * longer] for m in masks],
        "logprobs": [[*x, *[-9.0] * longer] for x in logprobs],
        "teacher_logprobs": [[*x, *[-9.0] * longer] for x in teachers],
        "token_rewards": [[*rng.normal(0, 1, n).tolist(), *[0.0] * longer] for n in LENGTHS],
        "advantage": rng.normal(0, 1, count),
        "reward": rng.normal(0, 1, count),
        "weight": rng.uniform(0.5, 1.5, count),
        "lag": rng.integers(0, 4, count),
        "is_expert": rng.random(count) < 0.4,
        "temperature": rng.choice([0.7, 1.0, 1.4], count),
        "group": np.arange(count) // 2,
    }
    return examples(pl.DataFrame(columns))


@dataclass(frozen=True)
class Step:
    """What a step did: its gradient, the weights after it, and what it measured."""

    gradient: torch.Tensor
    weights: torch.Tensor
    measured: dict[str, float]


def step(
    algorithm: Any,
    rows: Examples,
    *,
    micro_batch_tokens: int = 10_000,
    pad_id: int = 0,
    packing: bool = True,
    world: SingleProcess | None = None,
    precision: Literal["auto", "float32", "bfloat16"] = "float32",
    max_logits_bytes: int = LOGITS_BYTES,
) -> Step:
    """Take one step on a fresh copy of the same model; all processes of a world must."""
    made = resolve(algorithm)
    if made.unit == "pair":
        rows = replace(rows, units=rows.rows["group"].long())
    settings = TrainerConfig(
        learning_rate=1e-2,
        max_grad_norm=1e9,
        micro_batch_tokens=micro_batch_tokens,
        precision=precision,
        max_logits_bytes=max_logits_bytes,
    )
    trained = networks(made)
    trained.packing, trained.max_logits_bytes = packing, max_logits_bytes
    if isinstance(world, MultiProcess):
        shard(trained, world, needs=made.needs)
    optimization = Updater(trained, made, settings, total_steps=3, pad_id=pad_id, world=world)
    measured = optimization.step(rows).metrics
    parameters = [p for network in trained.trained.values() for p in network.parameters()]
    gradient = torch.cat([whole(p.grad).flatten() for p in parameters if p.grad is not None])
    weights = torch.cat([whole(p.detach()).flatten() for p in parameters])
    return Step(gradient, weights, measured)


def assert_same(one: Step, other: Step) -> None:
    scale = float(one.gradient.abs().max())
    assert scale > 1e-4
    assert float((one.gradient - other.gradient).abs().max()) <= 1e-5 * scale
    # A loss is what is left of terms that are 20 times as large: it has their error.
    assert one.measured == pytest.approx(other.measured, rel=1e-5, abs=1e-5)
