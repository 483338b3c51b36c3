"""Histories of runs, written straight to a store: `History(seed).write(store)`."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import polars as pl
import pytest
from support.table_rows import event, policy

from rlake.store import Store, Task

Row = dict[str, Any]
START = datetime(2026, 1, 1, tzinfo=UTC)
SEEDS = (*range(5), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 20)))
"""What statistical tests hold for: a few in each run of the slow tests, all in the long ones."""


class History:
    """A run of `steps` steps: each draws the `groups` groups of its batch, in their order.

    Tasks of two tasksets, `easy` and `hard`, come in random order; a row's reward is a coin of its
    task's difficulty. A test plants something by changing `rows` before they are written.
    """

    def __init__(
        self,
        seed: int,
        *,
        steps: int = 20,
        groups: int = 16,
        size: int = 4,
        tasks: int = 40,
        run_id: str = "r",
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.steps, self.max_lag, self.run_id = steps, 2, run_id
        self.tasks = [
            Task.ask(f"{i}?", str(i), taskset="easy" if i % 2 else "hard") for i in range(tasks)
        ]
        chance = {t.task_id: (0.75 if t.taskset == "easy" else 0.35) for t in self.tasks}
        self.chance = {
            t: float(np.clip(p + self.rng.normal(0, 0.1), 0, 1)) for t, p in chance.items()
        }
        self.taskset = {t.task_id: t.taskset for t in self.tasks}
        self.rows = [
            self._row(step, group, i, str(task.task_id))
            for step in range(1, steps + 1)
            for group in range(groups)
            for task in [self.tasks[int(self.rng.integers(tasks))]]
            for i in range(size)
        ]

    def _row(self, step: int, group: int, index: int, task: str) -> Row:
        length = int(self.rng.integers(5, 60))
        reward = float(self.rng.random() < self.chance[task])
        return {
            "experience_id": f"{self.run_id}/{step:06d}/{group:04d}/{index:04d}",
            "run_id": self.run_id,
            "task_id": task,
            "group_id": f"{self.run_id}/{step:06d}/{group:04d}",
            "rollout_index": index,
            "batch": step,
            "source": "explorer",
            "engine": "transformers",
            "policy_version": step - 1,
            "num_tokens": 10 + length,
            "prompt_length": 10,
            "reward": reward,
            "rewards": [{"name": "correct", "value": reward}],
            "response_text": " ".join(map(str, self.rng.integers(0, 1000, size=length // 4 + 2))),
            "finish_reason": "length" if length >= 57 else "stop",
            "created_at": START + timedelta(seconds=step * 10 + 1),
        }

    def change(self, which: Callable[[Row], bool], **columns: Any) -> None:
        """Change columns of some rows; a value may be a function of the row."""
        for row in self.rows:
            if which(row):
                row |= {n: v(row) if callable(v) else v for n, v in columns.items()}

    def write(
        self, store: Store, *, drawn: Callable[[Row], bool] | None = None, config: str | None = None
    ) -> Store:
        """Write it; each row that is not dropped, and is `drawn`, is drawn in its batch's step."""
        store.append("tasks", self.tasks)
        store.append("experiences", self.rows)
        used = [r for r in self.rows if r.get("drop_reason") is None and (not drawn or drawn(r))]
        store.append(
            "draws",
            pl.DataFrame(
                {
                    "run_id": self.run_id,
                    "attempt": 1,
                    "step": row["batch"],
                    "position": i,
                    "experience_id": row["experience_id"],
                    "epoch": 1,
                    "weight": 1.0,
                    "lag": row["batch"] - 1 - row["policy_version"],
                    "advantage": row["reward"] - 0.5,
                    "sampler": "fifo",
                    "digest": "d",
                }
                for i, row in enumerate(used)
            ),
        )
        config = config or f'{{"schedule": {{"max_lag": {self.max_lag}}}}}'
        store.append(
            "job_events", [event("done", run_id=self.run_id, config=config, created_at=START)]
        )
        store.append(
            "policies",
            [
                policy(1, v, run_id=self.run_id, created_at=START + timedelta(seconds=10 * v))
                for v in range(self.steps + 1)
            ],
        )
        return store
