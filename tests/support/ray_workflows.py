"""What explorers on Ray try in tests: rows that say in which process they were made."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from rlake.loop.inference.policy import Policy
from rlake.loop.workflows import single_turn
from rlake.store import Experience, Task


async def noting_process(task: Task, policy: Policy, *, opens: str | None = None) -> Experience:
    """Answer, some tasks later than others, and note the process.

    What has learned a little answers when the file `opens` is there, so that a run does not end
    before.
    """
    await asyncio.sleep(0.02 * (int(task.answer or 0) % 5))
    async with asyncio.timeout(280):
        while opens and (policy.version or 0) >= 5 and not Path(opens).exists():
            await asyncio.sleep(0.02)
    row = await single_turn(task, policy)
    return replace(row, metrics={**row.metrics, "pid": float(os.getpid())})


def share_of_even(task: Task, experience: Experience) -> float:
    """Reward even digits, whatever was asked."""
    return sum(c in "02468" for c in experience.response_text or "") / 3
