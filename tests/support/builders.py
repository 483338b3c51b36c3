"""Small builders that tests share: `from support.builders import experiences, rows`."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
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
    """Make n rollouts, `group_size` of each task; a sequence of rewards is repeated."""
    rewards = cycle([reward] if reward is None or isinstance(reward, float | int) else reward)
    made = []
    for i, one in enumerate(islice(rewards, n)):
        group, rollout = divmod(i, group_size)
        values: dict[str, Any] = {
            "task_id": task(group).task_id,
            "group_id": f"g{group:03d}",
            "experience_id": f"g{group:03d}/{rollout:02d}",
            "rollout_index": rollout,
            "reward": one,
            "response_text": str(2 * group) if one else "no idea",
        }
        made.append(Experience(**(values | columns)))
    return made


def line_of(file: str, text: str) -> str:
    """The first line of a file that holds a text, as errors of users' code name it."""
    lines = Path(file).read_text().splitlines()
    return f"({Path(file).name}:{1 + next(i for i, line in enumerate(lines) if text in line)})"


def table(records: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Return an experience for each mapping of columns, as a frame with all declared columns."""
    return rows(one for columns in records for one in experiences(1, **columns))


def rows(records: Iterable[Experience | Task]) -> pl.DataFrame:
    """Return the rows of experiences (or tasks) as a frame with all declared columns."""
    records = list(records)
    name = "tasks" if records and isinstance(records[0], Task) else "experiences"
    return pl.DataFrame(pl.from_arrow(conform(TABLES[name], records)))
