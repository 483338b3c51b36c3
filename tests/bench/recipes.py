"""What each algorithm makes of the digits that grpo_digits sorts: one figure a recipe."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from .figure import Bench, Figure

if TYPE_CHECKING:
    from rlake.store import Store

TAUGHT = (
    "on_policy_distillation_digits",
    "stored_distillation_digits",
    "jsd_digits",
    "jsd_sampled_digits",
)
"""Recipes whose teacher is what sft_digits made in the same store."""
DIGITS = (
    "sft_digits",
    "dft_digits",
    "cpt_digits",
    "raft_digits",
    "grpo_digits",
    "dr_grpo_digits",
    "dapo_digits",
    "gspo_digits",
    "cispo_digits",
    "sapo_digits",
    "m2po_digits",
    "clip_b_digits",
    "clip_v_digits",
    "rloo_digits",
    "remax_digits",
    "reinforce_digits",
    "reinforce_plus_plus_digits",
    "ppo_digits",
    "opmd_digits",
    "asymre_digits",
    "topr_digits",
    "sppo_digits",
    "rec_digits",
    "mix_digits",
    "chord_digits",
    "multi_step_grpo_digits",
    "gigpo_digits",
    *TAUGHT,
)
"""Recipes on the digits, each teacher before those it teaches."""
SEEDS = (0, 1, 2)
EDGE = 5
"""Steps at the start and at the end whose rewards are compared."""


@dataclass(frozen=True)
class Learned:
    """What a recipe came to: rewards on tasks never trained on, greedy, and of the tries."""

    before: float
    after: float
    first: float | None
    """Mean reward of the tries of the first steps; None offline."""
    last: float | None
    """The same of the last."""
    seconds: float

    @property
    def gain(self) -> float:
        """How far the reward rose: of its own tries, and offline of the held-out tasks."""
        if self.first is None or self.last is None:
            return self.after - self.before
        return self.last - self.first


def recipes(bench: Bench) -> Iterator[Figure]:
    """Run every recipe on the digits with three seeds."""
    from rlake.store import connect

    found: dict[str, list[Learned]] = {name: [] for name in DIGITS}
    for seed in SEEDS:
        store = connect(bench.folder / f"recipes-{seed}")
        for name in DIGITS:
            found[name].append(learn(name, store, seed=seed))
    for name, each in found.items():
        message = "; ".join(_told(one) for one in each)
        least = min(one.gain for one in each)
        yield Figure(
            f"recipe_{name}",
            mean(one.after for one in each),
            "mean reward on held-out tasks, greedy",
            None,
            f"seeds {', '.join(map(str, SEEDS))}: {message}; {mean(o.seconds for o in each):.1f} s",
            least,
        )


def learn(name: str, store: "Store", *, seed: int = 0, steps: int | None = None) -> Learned:
    """Run a recipe in a store, and measure it before and after."""
    from time import perf_counter

    from rlake.loop.config import load
    from rlake.loop.evaluation.evaluate import evaluate
    from rlake.loop.run import run

    short = [] if steps is None else [f"trainer.steps={steps}"]
    config = load(name, [f"seed={seed}", "trainer.checkpoint_every=1000", *short])
    before = evaluate(store, config).reward_mean
    began = perf_counter()
    run(store, config)
    seconds = perf_counter() - began
    after = evaluate(store, config).reward_mean
    tries = store.sql(
        f"SELECT avg(reward) FROM experiences WHERE run_id = '{name}' AND drop_reason IS NULL "
        "GROUP BY step ORDER BY step"
    ).fetchall()
    rewards = [reward for (reward,) in tries]
    edges = (mean(rewards[:EDGE]), mean(rewards[-EDGE:])) if rewards else (None, None)
    return Learned(before, after, *edges, seconds)


def _told(one: Learned) -> str:
    tries = "" if one.first is None else f", tries {one.first:.2f} -> {one.last:.2f}"
    return f"held-out {one.before:.2f} -> {one.after:.2f}{tries}"
