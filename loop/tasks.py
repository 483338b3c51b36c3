"""Which tasks come when: made once, chosen by SQL, shuffled anew each epoch by the run's seed."""

from collections.abc import Sequence

import numpy as np

from ..store import Store, Task
from ..store.errors import ConfigError
from . import toy as toy_module
from .config import TasksConfig
from .resolve import call


def prepare(store: Store, config: TasksConfig) -> None:
    """Store the tasks that the configuration makes; those that are there already are left alone."""
    if config.make is not None:
        store.append("tasks", list(call(config.make, toy_module, "task maker")))


def select(store: Store, where: str) -> list[Task]:
    """Return the tasks for which an SQL condition holds, in the order of their ids.

    Raises ConfigError when there are none.
    """
    rows = store.sql(f"SELECT * FROM tasks WHERE ({where}\n) ORDER BY task_id").pl().to_dicts()
    if not rows:
        raise ConfigError(
            f"no task matches `{where}`, the store has {store.count('tasks')}; import some with "
            "`rlake import tasks`, or change `tasks.where`"
        )
    return [Task.from_row(row) for row in rows]


class Curriculum:
    """Batches of tasks: batch b is a function of the tasks, the seed and b alone."""

    def __init__(self, tasks: Sequence[Task], *, batch_size: int, seed: int) -> None:
        self._tasks, self._batch_size, self._seed = tasks, batch_size, seed

    def batch(self, number: int) -> list[Task]:
        """Return batch `number`, from 1; every task comes once before any comes again."""
        first = (number - 1) * self._batch_size
        return [self._at(i) for i in range(first, first + self._batch_size)]

    def _at(self, i: int) -> Task:
        epoch, place = divmod(i, len(self._tasks))
        if getattr(self, "_epoch", None) != epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._tasks))
        return self._tasks[self._order[place]]
