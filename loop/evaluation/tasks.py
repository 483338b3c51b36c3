"""The tasks to evaluate on, and the labels of their rows."""

from dataclasses import replace

from ...store import Experience, Store, Task
from ...store.errors import ConfigError, nearest
from ..config import EvaluateConfig, RunConfig
from ..tasks.prepare import select


def evaluation_tasks(store: Store, settings: EvaluateConfig) -> list[Task]:
    """Return the tasks to evaluate on, in the order of their IDs.

    Raises ConfigError if there are none, if a named taskset has none, and if pass@k needs more
    rollouts than a task has.
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
        _check_pass_at(settings.of(name), f"evaluate.tasksets.{name}" if name else "evaluate")
    return [
        task for task in tasks if settings.tasksets is None or task.taskset in settings.tasksets
    ]


def check_evaluation(store: Store, config: RunConfig) -> None:
    """Raise ConfigError if evaluations are configured during the run but have no tasks."""
    if config.evaluate is not None and config.evaluate.every_steps is not None:
        evaluation_tasks(store, config.evaluate)


def _check_pass_at(settings: EvaluateConfig, key: str) -> None:
    most = max(settings.pass_at, default=1)
    if most > settings.group_size:
        raise ConfigError(
            f"pass@{most} needs {most} rollouts of each task, and `{key}.group_size` is "
            f"{settings.group_size}; raise it, with a temperature above 0"
        )


def labeled(row: Experience, split: str | None, *, model: str | None = None) -> Experience:
    """Add a task's split to its row's metadata, and the model where it is not the run's."""
    labels = {"split": split, "model": model}
    metadata = {**(row.metadata or {}), **{k: v for k, v in labels.items() if v is not None}}
    if model is None:
        return replace(row, metadata=metadata or None)
    return replace(row, policy_version=None, segments=None, metadata=metadata)
