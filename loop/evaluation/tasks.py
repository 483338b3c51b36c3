"""The tasks that a policy is measured on, and how their rows are told from others."""

from dataclasses import replace

from ...store import Experience, Store, Task
from ...store.errors import ConfigError, nearest
from ..config import EvaluateConfig, RunConfig
from ..tasks.select import select


def measured_tasks(store: Store, settings: EvaluateConfig) -> list[Task]:
    """Return the tasks that are measured on, in the order of their ids.

    Raises ConfigError when there are none, also of one taskset that is named, and for more tries of
    pass@k than a task has.
    """
    tasks = select(store, settings.where, key="evaluate.where")
    known = {task.taskset for task in tasks}
    for name in settings.tasksets or {}:
        if name not in known:
            raise ConfigError(
                f"`evaluate.tasksets` names `{name}`, and no task of it matches "
                f"`{settings.where}`{nearest(name, known)}; there are {', '.join(sorted(known))}"
            )
    for name in settings.tasksets or [""]:
        _check_tries(settings.of(name), f"evaluate.tasksets.{name}" if name else "evaluate")
    return [
        task for task in tasks if settings.tasksets is None or task.taskset in settings.tasksets
    ]


def check_measured(store: Store, config: RunConfig) -> None:
    """Raise ConfigError when a run is to be measured while it goes on, and cannot be."""
    if config.evaluate is not None and config.evaluate.every_steps is not None:
        measured_tasks(store, config.evaluate)


def _check_tries(settings: EvaluateConfig, key: str) -> None:
    most = max(settings.pass_at, default=1)
    if most > settings.group_size:
        raise ConfigError(
            f"pass@{most} needs {most} tries at each task, and `{key}.group_size` is "
            f"{settings.group_size}; raise it, with a temperature above 0"
        )


def labelled(row: Experience, split: str | None, *, model: str | None = None) -> Experience:
    """Say of a row of which split its task is, and which model wrote it if none of the run's."""
    message = {"split": split, "model": model}
    metadata = {**(row.metadata or {}), **{k: v for k, v in message.items() if v is not None}}
    if model is None:
        return replace(row, metadata=metadata or None)
    return replace(row, policy_version=None, segments=None, metadata=metadata)
