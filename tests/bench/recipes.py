"""What each algorithm makes of the digits that grpo_digits sorts: one figure an algorithm."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from .figure import Bench, Figure

if TYPE_CHECKING:
    from rlake.loop.config import RunConfig
    from rlake.store import Store

ROWS = "trainer.batch_size=128"
"""What algorithms need that compare no groups: their batch counts rows."""
TAUGHT: dict[str, tuple[str, ...]] = {
    "on_policy_distillation_digits": ("on_policy_distillation_digits",),
    "stored_distillation_digits": ("stored_distillation_digits",),
    "jsd_digits": ("on_policy_distillation_digits", "algorithm={jsd: {beta: 0.5}}"),
    "jsd_sampled_digits": (
        "on_policy_distillation_digits",
        "algorithm={jsd: {beta: 0.5, over: sampled}}",
    ),
}
"""Those whose teacher is what sft_digits made in the same store."""
CHORD = "algorithm={chord: {mu: 0.5, mu_valley: 0.05, mu_decay_steps: 40, phi: false}}"
DIGITS: dict[str, tuple[str, ...]] = {
    "sft_digits": ("sft_digits",),
    "dft_digits": ("sft_digits", "algorithm={sft: {weighting: probability}}"),
    "cpt_digits": ("sft_digits", "algorithm=cpt"),
    "raft_digits": ("grpo_digits", "algorithm=raft"),
    "grpo_digits": ("grpo_digits",),
    "grpo_moe": ("grpo_moe",),
    "dr_grpo_digits": ("grpo_digits", "algorithm=dr_grpo"),
    "dapo_digits": ("grpo_digits", "algorithm=dapo"),
    "gspo_digits": ("grpo_digits", "algorithm=gspo"),
    "cispo_digits": ("grpo_digits", "algorithm=cispo"),
    "sapo_digits": ("grpo_digits", "algorithm=sapo"),
    "m2po_digits": ("grpo_digits", "algorithm=m2po"),
    "parts_digits": (
        "grpo_digits",
        "algorithm={policy_gradient: {loss: sequence_clipped, advantage: {pass_at_k: {k: 2}}}}",
    ),
    "clip_b_digits": ("grpo_digits", "algorithm=clip_b"),
    "clip_v_digits": ("grpo_digits", "algorithm=clip_v"),
    "rloo_digits": ("grpo_digits", "algorithm=rloo"),
    "remax_digits": ("grpo_digits", "algorithm=remax", ROWS),
    "reinforce_digits": ("grpo_digits", "algorithm=reinforce", ROWS),
    "reinforce_plus_plus_digits": ("grpo_digits", "algorithm=reinforce_plus_plus", ROWS),
    "ppo_digits": ("grpo_digits", "algorithm=ppo", ROWS),
    "a2c_digits": ("grpo_digits", "algorithm=a2c", ROWS),
    "r3l_digits": ("grpo_digits", "algorithm=r3l"),
    "opmd_digits": ("grpo_digits", "algorithm=opmd"),
    "asymre_digits": ("grpo_digits", "algorithm=asymre"),
    "topr_digits": ("grpo_digits", "algorithm=topr", ROWS),
    "sppo_digits": ("grpo_digits", "algorithm=sppo"),
    "rec_digits": ("grpo_digits", "algorithm=rec"),
    "mix_digits": ("mix_digits",),
    "chord_digits": ("mix_digits", CHORD),
    "multi_step_grpo_digits": ("multi_step_grpo_digits",),
    "gigpo_digits": ("multi_step_grpo_digits", "algorithm=gigpo"),
    "cod_digits": ("multi_step_grpo_digits", "algorithm={cod: {gamma: 1.0}}"),
    **TAUGHT,
}
"""A recipe on the digits and what changes it, by the run's name; each teacher before its pupils."""
PAIRS: dict[str, tuple[str, ...]] = {
    "dpo_digits": ("dpo_digits",),
    "ipo_digits": ("dpo_digits", "algorithm=ipo"),
    "simpo_digits": ("dpo_digits", "algorithm=simpo"),
    "orpo_digits": ("dpo_digits", "algorithm=orpo"),
    "kto_digits": ("kto_digits",),
    "reward_model_digits": ("dpo_digits", "algorithm=reward_model", "evaluate=null"),
}
"""The same of algorithms that learn from stored pairs or labels."""
SEEDS = (0, 1, 2)
EDGE = 5
"""Steps at the start and at the end whose rewards are compared."""


@dataclass(frozen=True)
class Learned:
    """What an algorithm came to: rewards on tasks never trained on, greedy, and of the tries."""

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
    """Run every algorithm on the digits with three seeds."""
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


def settings(name: str, *overrides: str) -> "RunConfig":
    """Return the configuration of a run on the digits; checkpoints would only cost time."""
    from rlake.loop.config import load

    recipe, *changes = {**DIGITS, **PAIRS}[name]
    return load(recipe, [f"name={name}", "trainer.checkpoint_every=1000", *changes, *overrides])


def learn(
    name: str,
    store: "Store",
    *,
    seed: int = 0,
    steps: int | None = None,
    edges: tuple[int, int] = (EDGE, EDGE),
) -> Learned:
    """Run an algorithm in a store, and evaluate it before and after.

    `edges` is how many of its first and of its last steps have their rewards compared.
    """
    from time import perf_counter

    from rlake.loop.evaluation.evaluate import evaluate
    from rlake.loop.run import run

    short = [] if steps is None else [f"trainer.steps={steps}"]
    config = settings(name, f"seed={seed}", *short)
    before = evaluate(store, config).reward_mean
    began = perf_counter()
    run(store, config)
    seconds = perf_counter() - began
    after = evaluate(store, config).reward_mean
    tries = store.sql(
        f"SELECT avg(reward) FROM experiences WHERE run_id = '{name}' AND drop_reason IS NULL "
        "GROUP BY batch ORDER BY batch"
    ).fetchall()
    rewards = [reward for (reward,) in tries]
    begun, ended = edges
    compared = (mean(rewards[:begun]), mean(rewards[-ended:])) if rewards else (None, None)
    return Learned(before, after, *compared, seconds)


def _told(one: Learned) -> str:
    tries = "" if one.first is None else f", tries {one.first:.2f} -> {one.last:.2f}"
    return f"held-out {one.before:.2f} -> {one.after:.2f}{tries}"
