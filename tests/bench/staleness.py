"""What rows of older policies cost, with and without correction: reward against `max_lag`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from rlake.store import Store, connect

from .figure import Bench, Figure, say
from .imitation import imitate

if TYPE_CHECKING:
    from rlake.loop.config import RunConfig

LAGS = (0, 1, 2, 4, 8, 16)
"""From the second on, nearly all rows of a run are exactly so old: the explorer runs ahead."""
SEEDS = (0, 1, 2)
CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "uncorrected": {"decoupled": True, "weights": "none"},
    "clipped": {},
    "corrected": {"decoupled": True, "cap": 2.0},
}
"""What stale rows count.

uncorrected: they are taken for fresh ones, ratios begin at 1, as where a trainer computes the
log-probs anew. clipped: PPO's range is around the policy that wrote them. corrected: the decoupled
objective (arXiv:2505.24298) with truncated importance weights.
"""
STEPS, LEARNING_RATE = 60, 1e-3
ROLLOUTS = 8
"""Rollouts of each of the hundred sums when a run has ended, sampled as in training."""
MODEL: Mapping[str, Any] = {
    "hidden_size": 48,
    "layers": 2,
    "heads": 4,
    "init_std": 0.06,
    "max_length": 32,
    "alphabet": "0123456789+=",
}


def staleness(bench: Bench) -> Iterator[Figure]:
    """Train with each lag, correction and seed, all in one store, and measure each in the end."""
    store = connect(bench.folder / "staleness")
    warm = warm_start(store)
    for lag in LAGS:
        for case in CORRECTIONS:
            rewards = [
                learned(store, configured(warm, case=case, lag=lag, seed=seed)) for seed in SEEDS
            ]
            say(f"max_lag {lag} {case}: {rewards}")
            yield _figure(f"staleness_{case}_{lag}", rewards, lag=lag)


def _figure(name: str, rewards: Sequence[float], *, lag: int) -> Figure:
    each = ", ".join(f"{seed}: {reward:.3f}" for seed, reward in zip(SEEDS, rewards, strict=True))
    return Figure(
        name,
        round(mean(rewards), 3),
        "reward",
        None,
        f"mean reward at the hundred sums of two one-digit numbers after {STEPS} steps with "
        f"max_ahead = max_lag = {lag}; mean of seeds {{{each}}}, standard deviation "
        f"{stdev(rewards):.3f}",
        min(rewards),
    )


def warm_start(store: Store) -> Path:
    """Imitate an expert who forgets four carries in five; return the folder of the weights."""
    from rlake.loop.config import build
    from rlake.loop.recipes.toys import addition, forgetful_answers

    tasks = list(addition(low=0, high=9, held_out=0))
    config = build(
        {
            "name": "warm_start",
            "threads": 1,
            "model": {"from_scratch": dict(MODEL)},
            "algorithm": "sft",
            "trainer": {
                "steps": 400,
                "where": "source = 'expert'",
                "max_uses": 1000,
                "batch_size": 64,
                "learning_rate": 3e-3,
                "lr_scheduler": {"warmup_steps": 10},
                "checkpoint_every": 400,
            },
        }
    )
    lines = forgetful_answers(tasks, answers=8, forget=0.8)
    return imitate(store, config, tasks, lines, answers=8)


def configured(
    warm: Path,
    *,
    case: str,
    lag: int,
    seed: int,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
) -> "RunConfig":
    """Return the run that all share but for their lag, correction and seed."""
    from rlake.loop.config import build

    return build(
        {
            "name": f"{case}_{lag}_{seed}",
            "seed": seed,
            "threads": 1,
            "model": {"path": str(warm)},
            "tasks": {"where": "taskset = 'addition'"},
            "algorithm": {
                "grpo": {
                    "group_size": 8,
                    "aggregation": "token-mean",
                    "correction": dict(CORRECTIONS[case]),
                }
            },
            "explorer": {"rewards": "exact_match", "sampling": {"max_tokens": 3}},
            "schedule": {"max_ahead": lag, "max_lag": lag},
            "trainer": {
                "steps": steps,
                "batch_size": 16,
                "learning_rate": learning_rate,
                "checkpoint_every": steps,
            },
            "evaluate": {
                "where": "taskset = 'addition'",
                "group_size": ROLLOUTS,
                "sampling": {"temperature": 1.0, "max_tokens": 3},
            },
        }
    )


def learned(store: Store, config: "RunConfig") -> float:
    """Run, and return the mean reward of the last weights."""
    from rlake.loop.evaluation.evaluate import evaluate
    from rlake.loop.run import run

    run(store, config)
    return evaluate(store, config).reward_mean
