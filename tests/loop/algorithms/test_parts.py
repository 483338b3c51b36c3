"""Algorithms put together in YAML: named ones are the same parts, and each advantage trains."""

from itertools import combinations
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from support.losses import batch_of, examples_of, logprobs_of, ragged, with_trained
from support.tiny_models import config, table

from rlake.loop.algorithms import Algorithm, resolve
from rlake.loop.algorithms.grpo import GRPO
from rlake.loop.algorithms.policy_gradient import LOSSES
from rlake.loop.cli.algorithms import describe
from rlake.loop.config import RunConfig, build
from rlake.loop.run import run
from rlake.operators import pass_at_k
from rlake.operators.resolve import public
from rlake.store import Store
from rlake.store.errors import ConfigError

SEQUENCES, SUMS = "seq-mean-token-mean", "seq-mean-token-sum"
Z, CENTERED = "group_zscore", "group_centered"
SAME: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "clipped", "advantage": Z, "aggregation": SEQUENCES},
    "dapo": {"loss": {"clipped": {"clip_high": 0.28}}, "advantage": Z, "group_size": 16},
    "dr_grpo": {"loss": "clipped", "advantage": CENTERED, "aggregation": SUMS},
    "rloo": {"loss": "log_likelihood", "advantage": "leave_one_out", "aggregation": SUMS},
    "gspo": {"loss": "sequence_clipped", "advantage": Z, "aggregation": SEQUENCES},
    "cispo": {"loss": "clipped_weight", "advantage": Z},
    "sapo": {"loss": "soft_gate", "advantage": Z, "aggregation": SEQUENCES},
    "sppo": {"loss": "clipped_log_ratio", "advantage": CENTERED},
    "m2po": {"loss": "second_moment", "advantage": Z},
    "topr": {"loss": "tapered", "advantage": "reinforce", "aggregation": SUMS},
    "rec": {"loss": "masked", "advantage": {"balanced": {"drop": "none"}}},
    "opmd": {"loss": "damped", "advantage": CENTERED, "aggregation": SUMS},
    "clip_b": {"loss": "entropy_mask", "advantage": Z},
    "clip_v": {"loss": "exact_entropy_mask", "advantage": Z},
    "asymre": {
        "loss": "log_likelihood",
        "advantage": {CENTERED: {"shift": -0.1}},
        "aggregation": SUMS,
    },
    "gigpo": {"loss": "clipped", "advantage": "gigpo"},
    "multi_step_grpo": {"loss": "clipped", "advantage": "step_zscore"},
}
"""Packaged algorithms as combinations of parts."""
PENALTIES: dict[str, Any] = {
    "kl": {"coef": 0.1, "estimator": "k2"},
    "entropy_coef": 0.01,
    "correction": {"weights": "sequence", "cap": 1.5},
}


def measured(algorithm: Algorithm, seed: int) -> tuple[float, torch.Tensor, dict[str, float]]:
    """The loss of ragged rows, its gradient and its metrics."""
    rows = ragged(seed)
    logprobs_BT = logprobs_of(rows)
    batch = with_trained(batch_of(algorithm.prepare(examples_of(rows))), logprobs_BT)
    loss = algorithm.loss(batch, logprobs_BT)
    loss.value.backward()
    assert logprobs_BT.grad is not None
    metrics = {name: float(value) for name, value in loss.metrics.items()}
    return loss.value.item(), logprobs_BT.grad, metrics


@pytest.mark.parametrize("more", [{}, PENALTIES], ids=["plain", "penalties"])
@pytest.mark.parametrize("name", SAME)
def test_an_algorithm_is_the_same_parts_bit_for_bit(name: str, more: dict[str, Any]) -> None:
    named = resolve({name: more})
    parts = resolve({"policy_gradient": SAME[name] | more})
    for seed in range(3):
        (one, one_BT, about), (other, other_BT, too) = (measured(a, seed) for a in (named, parts))
        assert one == other
        assert torch.equal(one_BT, other_BT)
        assert one_BT.any()
        assert about == too
    assert str(named.advantage()) == str(parts.advantage())
    assert named.needs == parts.needs


def test_every_loss_has_an_algorithm_that_is_compared_with_it() -> None:
    losses = [parts["loss"] for parts in SAME.values()]
    assert {one if isinstance(one, str) else next(iter(one)) for one in losses} == set(LOSSES)


GIVEN: dict[str, dict[str, Any]] = {"pass_at_k": {"k": 2}, "greedy_baseline": {"baseline": "lag"}}
"""Parameters that an operator cannot do without."""
OTHERS = {"greedy_baseline"}
"""Operators that read a column which no run has by itself."""


def advantages() -> list[str]:
    """The names of all operators that set an advantage."""
    made = {name: one(**GIVEN.get(name, {})) for name, one in public().items() if credits(name)}
    return sorted(name for name, one in made.items() if "advantage" in one.writes)


def credits(name: str) -> bool:
    return ".advantage." in public()[name].__module__


@pytest.mark.parametrize("name", sorted(set(advantages()) - OTHERS))
def test_every_advantage_reaches_training_from_yaml(name: str, store: Store) -> None:
    spec = {name: GIVEN.get(name, {})}
    rewards = "support.tiny_models:share_of_ones"
    run(
        store,
        config(
            algorithm={"policy_gradient": {"advantage": spec, "group_size": 4}},
            trainer={"steps": 1, "batch_size": 4},
            explorer={"rewards": rewards, "sampling": {"max_tokens": 3}},
        ),
    )
    drawn = table(store, "draws_current", "advantage")["advantage"]
    assert drawn.null_count() == 0
    assert drawn.abs().max() > 0  # pyright: ignore[reportOptionalOperand, reportOperatorIssue]


def by_all_sets(rewards: np.ndarray, k: int) -> np.ndarray:
    """Section 3 of arXiv:2508.10751, by listing all sets of k answers."""
    sets = list(combinations(range(len(rewards)), k))
    best = np.array([max(rewards[list(one)]) for one in sets], np.float64)
    mean, std = best.mean(), sqrt(((best - best.mean()) ** 2).mean())
    if std == 0:
        return np.zeros(len(rewards))
    of_set = (best - mean) / std
    return np.array(
        [
            np.mean([a for a, one in zip(of_set, sets, strict=True) if i in one])
            for i in range(len(rewards))
        ]
    )


def test_a_run_by_pass_at_k_is_trained_with_the_advantages_of_the_paper(store: Store) -> None:
    spec = {"loss": "clipped", "advantage": {"pass_at_k": {"k": 3, "threshold": 0.1}}}
    changes = {"algorithm": {"policy_gradient": spec | {"group_size": 6}}}
    run(store, config(**changes, trainer={"steps": 2, "batch_size": 4}))
    drawn = table(
        store,
        "draws_current d JOIN experiences e USING (experience_id)",
        "d.advantage, e.group_id, e.reward",
    )
    groups = [group for _, group in drawn.group_by("group_id")]
    assert any(group["advantage"].n_unique() > 1 for group in groups)
    for group in groups:
        expected = by_all_sets((group["reward"].to_numpy() > 0.1).astype(np.float64), 3)
        np.testing.assert_allclose(group["advantage"], expected, rtol=1e-6, atol=1e-6)


def test_a_run_by_the_deviation_of_the_batch_divides_all_groups_by_it(store: Store) -> None:
    """The mean of the group, the deviation of all rows of the step: arXiv:2508.08221."""
    spec = {"advantage": {"group_zscore": {"std": "batch"}}, "group_size": 4}
    run(store, config(algorithm={"policy_gradient": spec}, trainer={"steps": 3, "batch_size": 4}))
    drawn = table(
        store,
        "draws_current d JOIN experiences e USING (experience_id)",
        "d.step, d.advantage, e.group_id, e.reward",
    )
    for _, step in drawn.group_by("step"):
        reward = step["reward"].to_numpy().astype(np.float64)
        std = sqrt(((reward - reward.mean()) ** 2).sum() / (len(reward) - 1))
        assert std > 0
        for _, group in step.group_by("group_id"):
            own = group["reward"].to_numpy().astype(np.float64)
            expected = (own - own.mean()) / (std + 1e-6)
            np.testing.assert_allclose(group["advantage"], expected, rtol=1e-5, atol=1e-6)


def test_a_named_algorithm_takes_another_advantage() -> None:
    assert str(resolve({"gspo": {"advantage": "max_rl"}}).advantage()) == "max_rl(threshold=0.5)"
    charged = {"kl": {"coef": 0.1, "part_of": "reward"}, "advantage": "leave_one_out"}
    assert resolve({"grpo": charged}).advantage() is not None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"policy_gradient": {"loss": "cliped"}}, "loss `cliped` does not exist.*`clipped`"),
        ({"policy_gradient": {"advantage": "max_lr"}}, "`advantage` of `Parts`.*`max_rl`"),
        ({"policy_gradient": {"advantage": {"pass_at_k": {}}}}, "`advantage` of `Parts`: .*'k'"),
        ({"policy_gradient": {"advantage": "drop_flat_groups"}}, "does not set the column"),
        (
            {"policy_gradient": {"loss": {"clipped": {"clip_hihg": 1.0}}}},
            "the loss `clipped` has no parameter `clip_hihg`; did you mean `clip_high`",
        ),
        (
            {"policy_gradient": {"loss": {"tapered": {"baseline": 1.0}}}},
            "the loss `tapered` has no parameter `baseline`",
        ),
        (
            {"policy_gradient": {"loss": {"clipped": {"aggregation": SUMS}}}},
            "the loss `clipped` has no parameter `aggregation`",
        ),
        ({"policy_gradient": {"loss": {"clipped": {}, "tapered": {}}}}, "a loss is `name`"),
        ({"policy_gradient": {"loss": {"clipped": {"clip": -1.0}}}}, "`clip` of `clipped`"),
        ({"asymre": {"advantage": "max_rl"}}, "computes its own advantage.*`policy_gradient`"),
        (
            {"policy_gradient": {"advantage": "gigpo", "kl": {"coef": 0.1, "part_of": "reward"}}},
            "`kl.part_of` can only be `loss`",
        ),
        ({"grpo": {"credit": "max_rl"}}, "`grpo` has no parameter `credit`"),
    ],
    ids=str,
)
def test_parts_that_do_not_exist_or_fit_are_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(spec)


def test_parts_given_in_python_are_what_yaml_would_say() -> None:
    tree = {"name": "a", "model": {"from_scratch": {}}, "trainer": {"steps": 1}}
    made = build(tree | {"algorithm": GRPO(credit={"pass_at_k": {"k": 2}}), "explorer": {}})
    again = RunConfig.model_validate_json(made.model_dump_json())
    assert str(resolve(again.algorithm).advantage()) == "pass_at_k(k=2, threshold=0.5)"
    operator = {"policy_gradient": {"advantage": pass_at_k(k=2)}}
    given = build(tree | {"algorithm": operator, "explorer": {}})
    assert str(resolve(given.algorithm).advantage()) == "pass_at_k(k=2, threshold=0.5)"


def test_the_description_names_the_parts_by_their_keys() -> None:
    found = {one.name: one.default for one in describe("policy_gradient").parameters}
    assert (found["loss"], found["advantage"]) == ("clipped", Z)
    assert {"advantage": CENTERED}.items() <= {
        one.name: one.default for one in describe("dr_grpo").parameters
    }.items()
