"""Workflows, and an expert, for tasks that need no download."""

import asyncio
import re
from dataclasses import replace
from math import exp
from statistics import NormalDist

from ....store import Experience, Task
from ....store.errors import ConfigError
from ....store.ids import content_id
from ...inference.policy import Policy
from ...workflows.single_turn import experience
from .sums import share_right


async def step_by_step(task: Task, policy: Policy, *, steps: int = 4) -> list[Experience]:
    """Sample the answer in several steps; each step is a row, and all have the answer's reward.

    The prompt of a step is the task's prompt followed by the answer so far, so that rollouts with
    the same text are in the same state. It ends with an empty completion. `sampling.max_tokens` is
    the length of a step; the reward is `share_right` of the whole answer.
    """
    rows: list[Experience] = []
    said = ""
    for _ in range(steps):
        asked = [*task.messages[:-1], {"role": "user", "content": f"{task.prompt_text}{said}"}]
        [completion] = await policy.generate(asked)
        row = experience(replace(task, messages=asked), completion)
        rows.append(replace(row, task_id=task.task_id))
        said += completion.text
        if not completion.text:
            break
    reward = share_right(task, Experience(task_id=task.task_id, response_text=said))
    return [row.with_reward({"share_right": reward}) for row in rows]


_FURNITURE = {
    "bathroom": "cup",
    "bedroom": "bed",
    "kitchen": "counter",
    "living room": "chair",
    "workshop": "table",
}
"""A thing that is in this room of every house of ScienceWorld."""
_ERRAND = re.compile(r"move it to the (?P<color>\w+) box in the (?P<room>[\w ]+)\.")


def furniture_mover(description: str) -> list[str]:
    """Return commands for ScienceWorld's `find-non-living-thing` with teleports.

    >>> furniture_mover("First, focus on it. Then, move it to the red box in the bedroom.")
    ['teleport to bedroom', 'focus on bed', 'move bed to red box']
    """
    found = _ERRAND.search(description)
    if found is None or found["room"] not in _FURNITURE:
        raise ConfigError(f"`{description}` names no room with furniture; use `expert: gold`")
    thing = _FURNITURE[found["room"]]
    return [
        f"teleport to {found['room']}",
        f"focus on {thing}",
        f"move {thing} to {found['color']} box",
    ]


async def long_tail(
    task: Task, policy: Policy, *, median: float = 0.05, sigma: float = 1.0, longest: float = 2.0
) -> None:
    """Sample one answer, and wait as long as an environment with a long tail would.

    The seconds are log-normal with this median and sigma, at most `longest`. They are a function of
    the answer's tokens and log-probs, so that no two rollouts of a group take the same time.
    """
    [completion] = await policy.generate(task.messages)
    sampled = list(completion.token_ids or ()), list(completion.logprobs or ())
    seed = content_id(task.task_id, *sampled)
    chance = int(seed[:12], 16) / 16**12
    seconds = median * exp(sigma * NormalDist().inv_cdf(min(max(chance, 1e-9), 1 - 1e-9)))
    await asyncio.sleep(min(seconds, longest))
