"""The curriculum: the tasks of each batch, what was learned about them, and the record of both.

A batch is a function of the run's seed, its number, the tasks and other runs' rows as of the start
of the run, and the outcomes of the run's own earlier batches. All of that is stored, so that a run
that is resumed, or split in two processes, selects the same tasks.
"""

from functools import cached_property
from math import ceil

from ....store import Store, Task
from ....store.replay.mixture import split
from ...config import RunConfig
from ...runs.job import Job, pinned
from ..prepare import check_mixture, select
from .ledger import SelectionLedger
from .outcomes import History, before
from .taskset import TasksetSelector, parts


class Curriculum:
    """Batches of tasks, numbered from 1 and requested in order."""

    def __init__(self, job: Job, *, batch_size: int, group_size: int) -> None:
        """Continue from the outcomes of the run's batches; groups have `group_size` by default.

        Raises ConfigError when no task matches, or a selector cannot fill a batch.
        """
        config, past = job.config.tasks, pinned(job, "tasks")
        self._batch_size = batch_size
        self._tasks, self._parts = plan(
            past, job.config, batch_size=batch_size, group_size=group_size
        )
        self._firsts = [dict.fromkeys((part.name for part in self._parts), 0)]
        self._record = SelectionLedger(job, every=config.save_estimates_every)
        self._learning = any(part.learner for part in self._parts)
        done = self._record.restore(self._parts) if self._learning else 0
        if self._learning and not done:
            self._start(past, job.run_id)
        rules = [part.rule for part in self._parts]
        self._history = History(job.store, job.run_id, rules, after=done)

    def _start(self, past: Store, run_id: str) -> None:
        for part in self._parts:
            if part.history is not None and part.learner is not None:
                found = before(past, run_id, part.rule, part.history)
                part.learner.beliefs.count(part.seen(found))

    @cached_property
    def tasksets(self) -> dict[str, str]:
        """The taskset of each task, by its ID, if there are several; empty without `mixture`."""
        return {task_id: part.name for part in self._parts if part.name for task_id in part.places}

    @property
    def learns(self) -> bool:
        """Whether the outcomes of batches determine the next tasks."""
        return self._learning

    def batch(self, number: int, *, whole: int | None = None) -> list[Task]:
        """Return the tasks of batch `number`.

        All batches before it are stored, or at least those before batch `whole`.
        """
        self.learn(until=number if whole is None else min(number, whole))
        recorded = self._record.selected(number)
        if recorded is not None:
            by_id = {task.task_id: task for task in self._tasks}
            return [by_id[task_id] for task_id in recorded]
        first, counts = self._given(number)
        chosen = [
            (part, part.choose(counts[part.name], first[part.name], number)) for part in self._parts
        ]
        self._record.select(number, chosen)
        return [part.tasks[place] for part, one in chosen for place in one.places]

    def learn(self, *, until: int) -> None:
        """Learn from the outcomes of the batches before `until`."""
        if not self._learning:
            return
        for number, found in self._history.until(until):
            for part in self._parts:
                if part.learner is not None:
                    part.learner.learn(part.seen(found))
            self._record.believe(number, self._parts, found)

    def finish(self, *, until: int) -> None:
        """Learn from all batches before `until`, and record the estimates of all tasks."""
        self.learn(until=until)
        if self._learning:
            self._record.complete(until - 1, self._parts)

    def _given(self, number: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return how many tasks of each part earlier batches had, and how many this one has.

        Counts depend only on a batch's number, so that no epoch depends on where a run started.
        """
        shares = {part.name: part.share for part in self._parts}
        while len(self._firsts) <= number:
            counts = split(shares, self._batch_size, len(self._firsts))
            last = self._firsts[-1]
            self._firsts.append({name: last[name] + n for name, n in counts.items()})
        first, after = self._firsts[number - 1], self._firsts[number]
        return first, {name: after[name] - first[name] for name in after}


def plan(
    past: Store, config: RunConfig, *, batch_size: int, group_size: int
) -> tuple[list[Task], list[TasksetSelector]]:
    """Return the tasks of a run in their order, and the parts that select them.

    Groups have `group_size` where the configuration says nothing. Raises ConfigError when no task
    matches, or a selector cannot fill a batch.
    """
    tasks = select(past, config.tasks.where)
    check_mixture(past, config.tasks)
    chosen = parts(
        past,
        config.tasks,
        tasks,
        seed=config.seed,
        batch_size=batch_size,
        group_size=lambda name: config.explorer_for(name).group_size or group_size,
    )
    total = sum(part.share for part in chosen)
    for part in chosen:
        # 1e-9: a share that is rounded up must not ask for one task more
        part.check(ceil(part.share / total * batch_size - 1e-9))
    return tasks, chosen
