"""Tiny models, configurations and rows that tests share."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import polars as pl
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlake.loop.config import RunConfig, TinyModel, build
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import Sampling
from rlake.loop.inference.transformers_engine.engine import TransformersEngine
from rlake.loop.losses import Algorithm, Loss, aggregate
from rlake.loop.losses.batch import Batch
from rlake.loop.models.load import make_tiny
from rlake.loop.models.value_heads import Critic, of_policy
from rlake.loop.trainer.networks import Networks, frozen
from rlake.operators import Operator, leave_one_out
from rlake.store import Experience, Store

SPEC: dict[str, Any] = {
    "hidden_size": 16,
    "layers": 1,
    "heads": 2,
    "init_std": 0.3,
    "max_length": 48,
    "alphabet": "0123456789+=",
}
"""A model so small that a step takes milliseconds, with weights so large that its answers vary."""
ADDITION = {"low": 0, "high": 4, "held_out": 5}
SUMS = {"generator": {"rlake.loop.recipes.toys:addition": ADDITION}}
"""The section `tasks` of a run on sums of small numbers."""


def tiny(*, seed: int = 0, **spec: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Make a real model and its tokenizer."""
    return deepcopy(_made(TinyModel(**(SPEC | spec)).model_dump_json(), seed))


@cache
def _made(spec: str, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    # Copied: to make one takes twice as long, and tests make thousands.
    return make_tiny(TinyModel.model_validate_json(spec), seed=seed)


def config(**changes: Any) -> RunConfig:
    """Build the configuration of a short online GRPO run, with some sections changed.

    A section is merged key by key; None takes it out.
    """
    tree: dict[str, Any] = {
        "name": "demo",
        "threads": 1,
        "model": {"from_scratch": SPEC},
        "tasks": SUMS,
        "algorithm": {"grpo": {"group_size": 3}},
        "explorer": {"rewards": "support.tiny_models:share_of_ones", "sampling": {"max_tokens": 3}},
        "schedule": {"timeout": 60},
        "trainer": {"steps": 3, "batch_size": 2, "learning_rate": 1e-2},
    }
    for key, value in changes.items():
        old = tree.get(key)
        both = isinstance(old, dict) and isinstance(value, Mapping)
        tree[key] = {**old, **value} if both and key != "algorithm" else value  # type: ignore[dict-item]
    return build({k: v for k, v in tree.items() if v is not None})


def offline(**changes: Any) -> RunConfig:
    """Build the configuration of an SFT run on what is stored."""
    trainer = {"steps": None, **changes.pop("trainer", {})}
    return config(
        **{"explorer": None, "tasks": None, "algorithm": "sft", "trainer": trainer} | changes
    )


def share_of_ones(task: object, experience: Experience) -> float:
    """Reward the digit 1, whatever was asked."""
    text = experience.response_text or ""
    return text.count("1") / 3


def written(
    n: int, *, response: int | Sequence[int] = 3, group_size: int = 4, **columns: Any
) -> list[Experience]:
    """Make n stored tries with tokens: two of a prompt, then `response` many."""
    lengths = [response] * n if isinstance(response, int) else list(response)
    made = []
    for i, length in enumerate(lengths[:n]):
        tokens = [3 + i % 10, 13, *(3 + (i + j) % 12 for j in range(length))]
        values: dict[str, Any] = {
            "task_id": f"t{i // group_size}",
            "group_id": f"g{i // group_size:03d}",
            "experience_id": f"g{i // group_size:03d}/{i % group_size:02d}",
            "rollout_index": i % group_size,
            "token_ids": tokens,
            "loss_mask": [False, False] + [True] * length,
            "logprobs": [0.0, 0.0] + [-1.0 - 0.1 * j for j in range(length)],
            "prompt_length": 2,
            "reward": float(i % 2),
            "source": "imported",
        }
        made.append(Experience(**(values | columns)))
    return made


def metric(store: Store, name: str) -> dict[int, float]:
    """Return the current values of a metric by step."""
    rows = store.sql(f"SELECT step, value FROM metrics_current WHERE name = '{name}' ORDER BY step")
    return dict(rows.fetchall())


def table(store: Store, name: str, columns: str = "*") -> pl.DataFrame:
    """Return a table in the order of its rows."""
    return store.sql(f"SELECT {columns} FROM {name}").pl()


def networks(algorithm: Algorithm, *, seed: int = 0) -> Networks:
    """Make a policy, and the networks beside it that an algorithm needs, with other weights."""
    policy, tokenizer = tiny(seed=seed)
    if algorithm.network == "reward_model":
        return Networks(judge(policy, tokenizer, seed=seed))
    made = Networks(policy)
    if "reference" in algorithm.needs:
        made.reference = frozen(tiny(seed=seed + 1)[0])
    if algorithm.needs & {"vocabulary", "teacher_logprobs"}:
        made.teacher = frozen(tiny(seed=seed + 2)[0])
    if "values" in algorithm.needs:
        made.critic = critic(seed=seed + 3)
    return made


def judge(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0
) -> PreTrainedModel:
    """Make a reward model whose scores vary."""
    made = of_policy(policy, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.nn.init.normal_(made.get_parameter("score.weight"), std=0.3)
    return made


def critic(*, seed: int = 0) -> Critic:
    """Make a critic whose values vary."""
    made = Critic(tiny(seed=seed)[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.nn.init.normal_(made.head.weight, std=0.3)
    return made


def weights(model: torch.nn.Module) -> torch.Tensor:
    """Return all parameters of a model as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """Return all gradients of a model as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@dataclass(frozen=True, kw_only=True)
class Reinforce(Algorithm):
    """An algorithm that a user wrote in a file of theirs."""

    unit: ClassVar[Literal["row", "group", "pair"]] = "group"
    group_size: int = 3
    scale: float = 1.0

    def advantage(self) -> Operator:
        return leave_one_out()

    def loss(self, batch: Batch, logprobs_BT: torch.Tensor) -> Loss:
        losses_BT = -self.scale * logprobs_BT * batch.advantage_BT
        return Loss(aggregate(losses_BT, batch, "token-mean"), {})


def speaking(*, version: int = 0, sampling: Sampling | None = None, **spec: Any) -> ChatPolicy:
    """Return a policy that speaks through the tiny model."""
    return ChatPolicy(TransformersEngine(*tiny(**spec), version=version), sampling=sampling)
