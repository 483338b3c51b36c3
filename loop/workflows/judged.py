"""The reward of a row while its workflow is still at work."""

from ...store.records import Experience, Task
from ..trajectories.rewards import Rewards, RewardSpec, rewards_of


async def judged(task: Task, row: Experience, reward: RewardSpec) -> Experience:
    """Return a row with its reward by the functions that `explorer.rewards` might name.

    Where one fails, the row has no reward, and a `drop_reason`.
    """
    return await Rewards(rewards_of(reward), seconds=None).of_row(task, row)
