"""How many rollouts each selector needs until a toy policy solves what it can learn to solve."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rlake.store import Store, Task, connect

from .figure import Bench, Figure, say
from .imitation import imitate, newest_weights

if TYPE_CHECKING:
    from rlake.loop.config import RunConfig

SELECTORS = ("shuffle", "by_pass_rate", "bots")
"""The first is uniform selection, with which the others are compared; all with their defaults."""
SEEDS = (0, 1, 2, 3, 4)
POOL = {"carried": 10, "plain": 10, "long": 180}
"""Tasks of each kind.

Sums of two digits with a carry, which the warm start solves one time in ten, and without, which it
solves every other time; and sums of three digits, which it never saw and never solves.
"""
LEARNABLE = "taskset = 'pool' AND metadata->>'kind' <> 'long'"
TARGET = 0.6
"""Mean reward over the tasks that are learnable, sampled as in training."""
EVERY, ROLLOUTS = 10, 40
"""Steps between two evaluations, and rollouts of each task in one."""
STEPS = 150
"""A run that has not reached the target by then counts as if it did so then."""
GROUPS, GROUP_SIZE = 12, 8


class Reached(Exception):
    """The target was reached at a step."""


def curricula(bench: Bench) -> Iterator[Figure]:
    """Count the rollouts to the target of each selector, for the same seeds and warm start."""
    warm = warm_start(bench.folder / "warm")
    uniform = 0.0
    for selector in SELECTORS:
        steps = {
            seed: steps_to_target(bench.folder / f"{selector}-{seed}", warm, selector, seed)
            for seed in SEEDS
        }
        rollouts = {seed: step * GROUPS * GROUP_SIZE for seed, step in steps.items()}
        middle = median(rollouts.values())
        uniform = uniform or middle
        each = ", ".join(f"{seed}: {count}" for seed, count in rollouts.items())
        late = sum(step >= STEPS for step in steps.values())
        yield Figure(
            f"curricula_{selector}",
            middle,
            "rollouts",
            None if selector == SELECTORS[0] else uniform,
            f"to mean reward {TARGET} on the {POOL['carried'] + POOL['plain']} learnable of "
            f"{sum(POOL.values())} tasks; median of seeds {{{each}}}, {late} of which had not "
            f"reached it at step {STEPS}; {middle / uniform:.2f} of uniform selection",
            min(rollouts.values()),
        )


def pool(seed: int = 0) -> Iterator[Task]:
    """Yield the tasks: one in ten to learn from, and the others too hard."""
    from rlake.loop.recipes.toys.sums import mixed_sums, without_carries

    left = dict(POOL)
    for task in mixed_sums(digits=(2, 3), each=600, seed=seed):
        question, answer = task.prompt_text or "", task.answer or ""
        is_plain = int(without_carries(question)) == int(answer)
        kind = "long" if len(answer) > 3 else "plain" if is_plain else "carried"
        if left[kind]:
            left[kind] -= 1
            yield Task.ask(question, answer, taskset="pool", metadata={"kind": kind})


def warm_start(folder: Path, *, steps: int = 200) -> Path:
    """Imitate an expert who often forgets to carry; return the folder of the weights."""
    from rlake.loop.config import load
    from rlake.loop.recipes.toys.sums import forgetful_answers, mixed_sums

    tasks = list(mixed_sums(digits=(2,), each=3000, seed=1))
    overrides = ["tasks.generator=null", f"trainer.steps={steps}", "trainer.max_uses=20"]
    config = load("quickstart_sft", [*overrides, "trainer.lr_scheduler.warmup_steps=20"])
    return imitate(connect(folder), config, tasks, forgetful_answers(tasks, answers=2), answers=2)


def configured(warm: Path, selector: str, seed: int, *, steps: int = STEPS) -> "RunConfig":
    """Return the run that all selectors share but for its selector and seed."""
    from rlake.loop.config import load

    overrides = [
        f"seed={seed}",
        f"model.path={warm}",
        "tasks.where=taskset = 'pool'",
        f"tasks.selector={selector}",
        f"trainer.steps={steps}",
        f"trainer.batch_size={GROUPS}",
        "trainer.lr_scheduler.name=constant",
        "trainer.checkpoint_every=1000",
        f"evaluate.where={LEARNABLE}",
        "evaluate.sampling.temperature=1.0",
        f"evaluate.group_size={ROLLOUTS}",
    ]
    config = load("quickstart_grpo", overrides)
    assert f"group_size': {GROUP_SIZE}" in str(config.algorithm), "the recipe's groups are so large"
    return config


def steps_to_target(folder: Path, warm: Path, selector: str, seed: int) -> int:
    """Run until the target is reached, by evaluations whose rollouts are not counted."""
    from rlake.loop.run import run

    store, other = connect(folder / "lake"), connect(folder / "other")
    for lake in (store, other):
        lake.append("tasks", list(pool()))
    config = configured(warm, selector, seed)

    def listen(job: str, step: int, values: Mapping[str, float]) -> None:
        if job == "train" and step % EVERY == 0:
            reward = measured(store, other, config)
            say(f"{selector} seed {seed} step {step}: {reward:.3f}")
            if reward >= TARGET:
                raise Reached(step)

    try:
        run(store, config, listener=listen)
    except Reached as reached:
        return int(reached.args[0])
    return STEPS


def measured(store: Store, other: Store, config: "RunConfig") -> float:
    """Return the mean reward of the newest weights, kept in another store."""
    from rlake.loop.evaluation.evaluate import evaluate

    return evaluate(other, config, model=newest_weights(store, config)).reward_mean
