"""Workflows, rewards and algorithms that fail in ways the loop must survive, or end by."""

import asyncio
import gc
import threading
from dataclasses import dataclass, replace

import torch
from support.tiny_models import Reinforce

from rlake.loop.algorithms import Loss
from rlake.loop.inference.policy import Policy
from rlake.loop.losses.batch import Batch
from rlake.loop.workflows import single_turn
from rlake.store import Experience, Task


async def fails_on_even(task: Task, policy: Policy) -> Experience:
    if int(task.answer or 0) % 2 == 0:
        raise ValueError("no even sums today")
    return await single_turn(task, policy)


async def fails(task: Task, policy: Policy) -> Experience:
    raise OSError("no sandbox")


def mistaken(task: Task, experience: Experience) -> float:
    raise ValueError("a mistake")


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


async def two_steps(task: Task, policy: Policy) -> list[Experience]:
    """Asks, shows the answer, and asks again: two rows a try, the outcome on the last."""
    first = await single_turn(task, policy)
    text = (first.response_text or "")[:2]
    shown = replace(task, messages=[{"role": "user", "content": text}])
    last = await single_turn(shown, policy)
    ones = float((last.response_text or "").count("1"))
    return [replace(first, reward=0.0), replace(last, task_id=task.task_id, reward=ones)]


async def forgets_logprobs(task: Task, policy: Policy) -> Experience:
    """Keeps what was sampled, and not how likely it was, as a chat server does."""
    return replace(await single_turn(task, policy), logprobs=None)


async def waits_for_the_third(task: Task, policy: Policy) -> Experience:
    """Answers, and in the third group of a batch waits for what never comes."""
    row = await single_turn(task, policy)
    rollout = getattr(policy, "rollout", "")
    if "/0002/" in rollout:
        await asyncio.Event().wait()
    return row


def small(task: Task, experience: Experience) -> float:
    """Rewards answers that begin with a digit up to 5."""
    return float((experience.response_text or "9")[:1] in "012345")


async def waits_after_batch_two(task: Task, policy: Policy) -> Experience:
    """Answers in the first two batches, and then waits for what never comes."""
    row = await single_turn(task, policy)
    if getattr(policy, "rollout", "").split("/")[1] > "000002":
        await asyncio.Event().wait()
    return row


async def apart(task: Task, policy: Policy) -> Experience:
    """Answers in a group of its own."""
    return replace(await single_turn(task, policy), group_id="apart", reward=1.0)


DEADLY: tuple[str, ...] | None = None
"""What the name of a try has in it that is to be the last."""


class DeadError(BaseException):
    """Stands for a kill: nothing that a job has catches it."""


async def dies_where_told(task: Task, policy: Policy) -> Experience:
    """Answers until the end that a test wants, in the middle of a batch or of a measurement."""
    rollout = getattr(policy, "rollout", "")
    if DEADLY is not None and all(part in rollout for part in DEADLY):
        raise DeadError
    return await single_turn(task, policy)


LATER: tuple[str, threading.Event] = ("", threading.Event())
"""What the name of a try has in it that waits between two requests, and for what."""


async def asks_again_later(task: Task, policy: Policy) -> list[Experience]:
    """Asks twice, and between the two some tries wait until something happened."""
    first = await single_turn(task, policy)
    name, event = LATER
    if name and name in getattr(policy, "rollout", ""):
        assert await asyncio.to_thread(event.wait, 20), "it never happened"
    return [first, await single_turn(task, policy)]


def lets_later_ones_go(task: Task, experience: Experience) -> float:
    """Ends the wait of `asks_again_later` as soon as some rollout is judged."""
    LATER[1].set()
    return float((experience.response_text or "").count("1"))


def frozen_objects(task: Task, experience: Experience) -> float:
    """Rewards with the number of objects that the garbage collector leaves alone."""
    return float(gc.get_freeze_count())


async def fails_and_counts_frozen(task: Task, policy: Policy) -> Experience:
    raise OSError(f"{gc.get_freeze_count()} objects are frozen")
