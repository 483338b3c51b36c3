"""Which tasks there are: made once, and chosen by SQL."""

from ...store import Store, Task
from ...store.errors import ConfigError
from ..config import TasksConfig
from ..config.resolve import call
from ..recipes.toys import sums as toy_module


def prepare(store: Store, config: TasksConfig) -> None:
    """Store the tasks that the configuration makes; those that are there already are left alone."""
    if config.generator is not None:
        store.append("tasks", list(call(config.generator, toy_module, "task maker")))


def select(store: Store, where: str, *, key: str = "tasks.where") -> list[Task]:
    """Return the tasks for which an SQL condition holds, in the order of their ids.

    Raises ConfigError when there are none; `key` is where the condition stands.
    """
    chosen = f"SELECT * FROM tasks_current AS tasks WHERE ({where}\n) ORDER BY task_id"
    rows = store.sql(chosen).pl().to_dicts()
    if not rows:
        raise ConfigError(
            f"no task matches `{where}`, the store has {store.count('tasks')}; import some with "
            f"`rlake import tasks`, or change `{key}`"
        )
    return [Task.from_row(row) for row in rows]
