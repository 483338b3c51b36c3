"""Small builders that tests share: `from support.builders import experiences, rows`."""

from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from typing import Any

import polars as pl

from rlake.store import Experience, Task
from rlake.store.schema import TABLES
from rlake.store.validate import conform

RIGHT_AND_WRONG = (1.0, 0.0, 0.0, 1.0)


def task(number: int = 0) -> Task:
    """The task `number + number`, with its answer."""
    return Task.ask(f"{number}+{number}=", str(2 * number))


def experiences(
    n: int,
    *,
    reward: float | Sequence[float | None] | None = None,
    group_size: int = 4,
    **columns: Any,
) -> list[Experience]:
    """Make n tries, `group_size` at each task; a sequence of rewards is repeated."""
    rewards = cycle([reward] if reward is None or isinstance(reward, float | int) else reward)
    made = []
    for i, one in enumerate(islice(rewards, n)):
        group, rollout = divmod(i, group_size)
        values: dict[str, Any] = {
            "task_id": task(group).task_id,
            "group_id": f"g{group:03d}",
            "experience_id": f"g{group:03d}/{rollout:02d}",
            "rollout": rollout,
            "reward": one,
            "response_text": str(2 * group) if one else "no idea",
        }
        made.append(Experience(**(values | columns)))
    return made


def rows(records: Iterable[Experience | Task]) -> pl.DataFrame:
    """Return the rows of experiences (or tasks) as a frame with all declared columns."""
    records = list(records)
    name = "tasks" if records and isinstance(records[0], Task) else "experiences"
    return pl.DataFrame(pl.from_arrow(conform(TABLES[name], records)))
