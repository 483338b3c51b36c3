"""One optimizer step on the rows of a batch: log-probs, loss, gradient, clipping, schedule."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from ..store.errors import JobError
from .algorithms import Algorithm
from .batch import Batch, Examples, micro_batches
from .config import TrainerConfig


@dataclass(frozen=True)
class Stepped:
    """What a step measured: numbers for `metrics`, and one number a row."""

    metrics: dict[str, float]
    surprise: list[float]
    """Mean negative log-prob of each row's trained tokens before the step, in nats."""


class Optimization:
    """AdamW with clipped gradients and a learning-rate schedule over one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        algorithm: Algorithm,
        config: TrainerConfig,
        *,
        total_steps: int,
        temperature: float,
        pad_id: int,
    ) -> None:
        self._model, self._algorithm, self._config = model, algorithm, config
        self._temperature, self._pad_id = temperature, pad_id
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
        self._schedule = LambdaLR(
            self._optimizer, lambda step: rate_share(step, config, total_steps=total_steps)
        )

    def step(self, rows: Examples) -> Stepped:
        """Take one step, and return what it measured; without rows nothing changes.

        Raises JobError when the loss or its gradient is not finite; then the weights are as before.
        """
        if not len(rows):
            return Stepped({"train/skipped": 1.0}, [])
        self._model.train()
        self._optimizer.zero_grad(set_to_none=True)
        sums: dict[str, float] = {}
        surprise = [0.0] * len(rows)
        for batch in self._batches(rows):
            logprobs_BT = self._logprobs(batch)
            loss = self._algorithm.loss(batch, logprobs_BT)
            loss.value.backward()
            for place, value in zip(batch.places, _surprise(batch, logprobs_BT), strict=True):
                surprise[place] = value
            for name, value in {"loss": loss.value, **loss.metrics}.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
        norm = float(
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.max_grad_norm)
        )
        if not torch.isfinite(torch.tensor([norm, sums["loss"]])).all():
            raise JobError(
                f"loss {sums['loss']} or gradient norm {norm} is not finite; the step's rows begin "
                f"with `{rows.experience_ids[0]}`: lower `trainer.learning_rate`, or look at them"
            )
        rate = float(self._schedule.get_last_lr()[0])
        self._optimizer.step()
        self._schedule.step()
        metrics = {f"train/{k}": v for k, v in sums.items()} | {
            "train/grad_norm": norm,
            "train/learning_rate": rate,
            "train/tokens": float(rows.num_trained_tokens),
        }
        return Stepped(metrics, surprise)

    @torch.no_grad()
    def loss_on(self, parts: Iterable[Examples]) -> float:
        """Return the mean negative log-likelihood of trained tokens in nats, learning nothing."""
        self._model.eval()
        total, tokens = 0.0, 0.0
        for rows in parts:
            for batch in self._batches(rows):
                total -= float((self._logprobs(batch) * batch.mask_BT).sum())
                tokens += float(batch.mask_BT.sum())
        return total / max(tokens, 1.0)

    def state(self) -> dict[str, Any]:
        """Return what a later process needs to go on."""
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])

    def _batches(self, rows: Examples) -> Iterator[Batch]:
        return micro_batches(
            rows,
            max_tokens=self._config.micro_batch_tokens,
            pad_id=self._pad_id,
            device=self._model.device,
        )

    def _logprobs(self, batch: Batch) -> Tensor:
        return token_logprobs(self._model, batch.token_ids_BT, temperature=self._temperature)


def _surprise(batch: Batch, logprobs_BT: Tensor) -> list[float]:
    """Return each sequence's mean negative log-prob of its trained tokens, 0 without any."""
    sums_B = (logprobs_BT.detach() * batch.mask_BT).sum(1)
    return (-sums_B / batch.mask_BT.sum(1).clamp(min=1.0)).tolist()


def rate_share(step: int, config: TrainerConfig, *, total_steps: int) -> float:
    """Return the share of the learning rate at a step, from 0: warm-up, then decay.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(warmup_steps=2, decay="linear", decay_to=0.5)
    >>> [rate_share(step, config, total_steps=6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.875, 0.75, 0.625]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return config.decay_to + (1 - config.decay_to) * shape[config.decay]


def token_logprobs(
    model: PreTrainedModel, token_ids_BT: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Return the log-prob of each token given those before it [B, T], in nats; the first has 0.

    No attention mask: padding stands on the right, where causal attention never looks.
    """
    logits_BTV = model(input_ids=token_ids_BT, use_cache=False).logits[:, :-1].float()
    logprobs_BTV = torch.log_softmax(logits_BTV / temperature, dim=-1)
    chosen_BT = logprobs_BTV.gather(-1, token_ids_BT[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen_BT, (1, 0))
