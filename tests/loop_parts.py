"""Workflows, rewards and algorithms that fail in ways the loop must survive, or end by."""

import asyncio
from dataclasses import dataclass

import torch
from tiny import Reinforce

from rlake.loop.algorithms import Loss
from rlake.loop.batch import Batch
from rlake.loop.policy import Policy
from rlake.loop.workflows import single_turn
from rlake.store import Experience, Task


async def fails_on_even(task: Task, policy: Policy) -> Experience:
    if int(task.answer or 0) % 2 == 0:
        raise ValueError("no even sums today")
    return await single_turn(task, policy)


async def fails(task: Task, policy: Policy) -> Experience:
    raise OSError("no sandbox")


def unsure(task: Task, experience: Experience) -> float | None:
    """Cannot judge answers of odd length."""
    text = experience.response_text or ""
    return None if len(text) % 2 else float(len(text))


@dataclass(frozen=True, kw_only=True)
class Explodes(Reinforce):
    """Its loss is infinite."""

    def loss(self, batch: Batch, logprobs_BT: torch.Tensor) -> Loss:
        return Loss(super().loss(batch, logprobs_BT).value + torch.inf, {})


async def never_returns(task: Task, policy: Policy) -> Experience:
    """Waits for what never comes, as a lost connection does."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets the event")


def gives_nothing(task: Task, experience: Experience) -> float | None:
    """Cannot judge anything."""
    return None
