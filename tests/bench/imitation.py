"""Warm starts: a model that imitates an expert who makes mistakes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlake.store import Experience, Store, Task

if TYPE_CHECKING:
    from rlake.loop.config import RunConfig


def imitate(
    store: Store,
    config: "RunConfig",
    tasks: Sequence[Task],
    lines: Iterable[Mapping[str, Any]],
    *,
    answers: int,
) -> Path:
    """Store tasks with answers, train on these, and return the folder of the weights."""
    from rlake.loop.run import train

    store.append("tasks", tasks)
    rows = [_row(tasks[i // answers], i, i % answers, line) for i, line in enumerate(lines)]
    store.append("experiences", rows)
    train(store, config)
    return newest_weights(store, config)


def newest_weights(store: Store, config: "RunConfig") -> Path:
    """Return the folder of a run's newest weights."""
    from rlake.loop.runs.job import run_folder
    from rlake.loop.weight_sync import newest

    return newest(store, run_folder(store, config), config.name).folder


def _row(task: Task, number: int, index: int, line: Mapping[str, Any]) -> Experience:
    return Experience(
        task_id=task.task_id,
        group_id=task.task_id,
        experience_id=f"expert/{number}",
        rollout_index=index,
        prompt_text=task.prompt_text,
        response_text=str(line["answer"]),
        reward=float(bool(line["is_right"])),
        source="expert",
    )
