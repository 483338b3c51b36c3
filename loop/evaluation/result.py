"""The result of an evaluation, and the metrics that it adds to the run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...store import Task
from ..config import EvaluateConfig
from ..runs.metrics import UNSCORED
from .estimates import PASSED, Estimate, Scores, estimates
from .history import RolloutScores
from .policies import EvaluatedPolicy


@dataclass(frozen=True)
class Evaluation:
    """An evaluation: estimates, and the run_id under which its rows are stored."""

    accuracy: float
    reward_mean: float
    num_tasks: int
    num_rows: int
    num_unscored: int
    """Rollouts whose reward could not be computed; they count neither as correct nor as wrong."""
    policy_version: int | None
    """None for a model that the run did not make."""
    run_id: str
    """The run_id of the rows in `experiences`."""
    model: str | None = None
    """The model that was evaluated, where it is not a version of the run."""
    estimates: tuple[Estimate, ...] = ()
    """Averages over tasks, with their intervals: accuracy, reward_mean, pass@K, best@K.

    Estimates of one taskset are prefixed with its name: `aime/pass@32`.
    """
    is_from_before: bool = False
    """Whether these are the rows of an earlier evaluation with the same settings."""

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics of the run."""
        made = {
            "eval/accuracy": self.accuracy,
            "eval/reward_mean": self.reward_mean,
            UNSCORED: float(self.num_unscored),
        }
        more = {f"eval/{e.name}": e.value for e in self.estimates if "@" in e.name or "/" in e.name}
        known = made | more
        return {name: value for name, value in known.items() if math.isfinite(value)}


def evaluation(
    settings: EvaluateConfig,
    tasks: Sequence[Task],
    one: EvaluatedPolicy,
    run_id: str,
    found: RolloutScores,
    *,
    seed: int,
    is_from_before: bool = False,
) -> Evaluation:
    """Return the result of an evaluation; NaN where no rollout could be scored."""
    scores = list(found.scores.values())
    flat = [score for task in scores for score in task]
    return Evaluation(
        accuracy=sum(score >= PASSED for score in flat) / len(flat) if flat else math.nan,
        reward_mean=sum(flat) / len(flat) if flat else math.nan,
        num_tasks=len(scores),
        num_rows=found.num_rows,
        num_unscored=found.num_unscored,
        policy_version=None if one.model is not None else one.version or 0,
        run_id=run_id,
        model=one.model,
        estimates=tuple(_estimates(settings, tasks, found, seed)),
        is_from_before=is_from_before,
    )


def _estimates(
    settings: EvaluateConfig, tasks: Sequence[Task], found: RolloutScores, seed: int
) -> list[Estimate]:
    scores = list(found.scores.values())
    if settings.tasksets is None:
        return estimates(scores, ks=settings.ks, seed=seed)
    made = estimates(scores, seed=seed)
    names = {task.task_id: task.taskset for task in tasks}
    for name in settings.tasksets:
        own: Scores = [score for task, score in found.scores.items() if names[task] == name]
        parts = estimates(own, ks=settings.of(name).ks, seed=seed)
        made += [replace(part, name=f"{name}/{part.name}") for part in parts]
    return made
