"""What schedules are worth when tries take unequally long: wall time, and the lags there are."""

from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING

from rlake.store import connect

from .figure import Bench, Figure, say

if TYPE_CHECKING:
    from rlake.loop.config import RunConfig

SCHEDULES = ("on_policy", "one_step_off", "asynchronous")
STEPS, ROUNDS = 100, 2
MEDIAN, SIGMA, LONGEST = 0.05, 1.0, 2.0
"""Seconds that a try takes beside its answer: log-normal, a long tail."""


def schedules(bench: Bench) -> Iterator[Figure]:
    """Run each schedule by turns, at learning rate 0, so that answers stay as long as they are."""
    from rlake.loop.run import run

    took: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    lags: dict[str, tuple[float, int]] = {}
    for turn in range(ROUNDS):
        for name in SCHEDULES:
            lake = connect(bench.folder / f"schedules-{name}-{turn}")
            config = configured(name)
            started = perf_counter()
            run(lake, config)
            took[name].append(perf_counter() - started)
            [(mean, most)] = lake.sql("SELECT avg(lag), max(lag) FROM draws_current").fetchall()
            lags[name] = mean, most
            say(f"{name}: {took[name][-1]:.1f} s, lag {mean:.2f} in the mean, {most} at most")
            if most > config.schedule.lag:
                raise AssertionError(f"{name} drew a row of lag {most}")
    slowest = min(took["on_policy"])
    for name in SCHEDULES:
        best, (mean, most) = min(took[name]), lags[name]
        yield Figure(
            f"schedule_{name}",
            round(slowest / best, 2),
            "x of on_policy's speed",
            1.6 if name == "asynchronous" else None,
            f"{STEPS} steps of 32 groups of 8 tries; a try waits {MEDIAN} s in the median, "
            f"log-normal, sigma {SIGMA}, {LONGEST} s at most; learning rate 0; best of {ROUNDS}; "
            f"lag {mean:.2f} in the mean, {most} at most, allowed {configured(name).schedule.lag}",
            best,
        )


def configured(schedule: str) -> "RunConfig":
    """Return the run that is measured."""
    from rlake.loop.config import build, load

    waits = {"median": MEDIAN, "sigma": SIGMA, "longest": LONGEST}
    changes = {
        "name": f"schedule_{schedule}",
        "schedule": schedule,
        "explorer": {
            "workflow": {"rlake.loop.recipes.toys:long_tail": waits},
            "rewards": "rlake.loop.recipes.toys:share_right",
            "group_size": 8,
            "sampling": {"max_tokens": 4},
        },
        "trainer": {
            **load("grpo_digits").trainer.model_dump(exclude_unset=True),
            "steps": STEPS,
            "batch_size": 32,
            "learning_rate": 0.0,
            "checkpoint_every": STEPS,
        },
    }
    return build({**load("grpo_digits").model_dump(exclude_unset=True), **changes})
