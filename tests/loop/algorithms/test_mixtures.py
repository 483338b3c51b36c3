"""Learning from an expert's rows beside the policy's own: MIX and CHORD."""

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import polars as pl
import pytest
import torch
from support.losses import NORM, Rows, batch_of, examples_of, logprobs_of, ragged
from support.tiny_models import config, offline, table, tiny, written

from rlake.loop.algorithms import resolve
from rlake.loop.algorithms.chord import CHORD
from rlake.loop.algorithms.grpo import GRPO
from rlake.loop.algorithms.mix import Mix
from rlake.loop.config import TrainerConfig
from rlake.loop.losses import Aggregation
from rlake.loop.run import run
from rlake.loop.trainer.networks import Networks
from rlake.loop.trainer.step import Updater
from rlake.store import Store
from rlake.store.errors import ConfigError, JobError

AGGREGATIONS = get_args(Aggregation)


def shares(rows: Rows, places: list[int], how: str) -> dict[int, float]:
    """What a token of each of these rows counts in the mean over them."""
    tokens = sum(rows.mask[i].sum() for i in places)
    one = 1 / max(1, len(places))
    return {
        i: {
            "token-mean": 1 / tokens,
            "seq-mean-token-mean": one / rows.mask[i].sum(),
            "seq-mean-token-sum": one,
            "seq-mean-token-sum-norm": one / NORM,
        }[how]
        for i in places
    }


def expected(rows: Rows, how: str, mu: float, *, phi: bool) -> tuple[float, np.ndarray]:
    """(1 - mu) times GRPO over own rows plus mu times (weighted) cross-entropy over others."""
    experts = rows.rows["is_expert"] > 0
    value, gradient = 0.0, np.zeros((len(rows), max(map(len, rows.new))))
    for kind, weight in ((False, 1 - mu), (True, mu)):
        scales = shares(rows, [i for i in range(len(rows)) if experts[i] == kind], how)
        for i, scale in scales.items():
            for t in np.flatnonzero(rows.mask[i]):
                new, credit = rows.new[i][t], rows.advantage[i]
                p = math.exp(new)
                ratio = math.exp(new - rows.old[i][t])
                bounded = min(max(ratio, 0.8), 1.2)
                is_free = ratio * credit <= bounded * credit
                loss = -min(ratio * credit, bounded * credit)
                slope = -ratio * credit if is_free else 0.0
                if kind:
                    slope = -p * (1 - p) if phi else -1.0
                    loss = slope * new
                value += weight * scale * rows.weight[i] * loss
                gradient[i, t] = weight * scale * rows.weight[i] * slope
    return value, gradient


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mix": ("mix", {}),
    "chord-mu": ("chord", {"mu_valley": 0.3, "phi": False}),
    "chord-phi": ("chord", {"mu_valley": 0.3, "phi": True}),
}


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_kind_of_row_is_averaged_by_itself(how: Aggregation, variant: str) -> None:
    """arXiv:2505.17826 (MIX) and arXiv:2508.11408 (CHORD, with and without phi)."""
    name, params = VARIANTS[variant]
    made = resolve({name: {"mu": 0.3, "aggregation": how, "norm": NORM, **params}})
    num_experts = set()
    for seed in range(5):
        rows = ragged(seed)
        batch = batch_of(made.prepare(examples_of(rows)), more=seed)
        new_BT = logprobs_of(rows, more=seed)
        loss = made.loss(batch, new_BT)
        loss.value.backward()
        value, gradient = expected(rows, how, 0.3, phi=params.get("phi", False))
        assert loss.value.item() == pytest.approx(value, rel=1e-11)
        assert new_BT.grad is not None
        found = new_BT.grad.numpy()[:, : gradient.shape[1]]
        np.testing.assert_allclose(found, gradient, rtol=1e-9, atol=1e-14)
        assert loss.metrics["mu"].item() == pytest.approx(0.3)
        num_experts.add(int(rows.rows["is_expert"].sum()))
    assert len(num_experts) > 1


def test_metrics_of_a_mixture_are_those_of_each_kind() -> None:
    rows = ragged(1)
    expert = rows.rows["is_expert"] > 0
    batch = batch_of(Mix().prepare(examples_of(rows)))
    found = Mix().loss(batch, logprobs_of(rows)).metrics
    new = [x[m] for x, m in zip(rows.new, rows.mask, strict=True)]
    told = np.concatenate([x for x, is_expert in zip(new, expert, strict=True) if is_expert])
    own = np.concatenate([x for x, is_expert in zip(new, expert, strict=True) if not is_expert])
    assert found["nll"].item() == pytest.approx(-told.mean())
    assert found["entropy"].item() == pytest.approx(-own.mean())


@pytest.mark.parametrize("is_expert", [0.0, 1.0])
def test_a_step_of_one_kind_of_row_has_that_kinds_loss(is_expert: float) -> None:
    rows = ragged(2)
    rows = replace(rows, rows={**rows.rows, "is_expert": np.full(6, is_expert)})
    batch = batch_of(Mix(mu=0.25).prepare(examples_of(rows)))
    found = Mix(mu=0.25).loss(batch, logprobs_of(rows)).value.item()
    alone: Any = resolve("sft") if is_expert else GRPO(aggregation="token-mean")
    whole = alone.loss(batch, logprobs_of(rows)).value.item()
    assert found == pytest.approx((0.25 if is_expert else 0.75) * whole, rel=1e-12)


def test_what_an_expert_scored_or_how_likely_it_was_changes_nothing() -> None:
    rows = ragged(3)
    is_expert = rows.rows["is_expert"] > 0
    pairs = zip(rows.old, is_expert, strict=True)
    other = replace(
        rows,
        advantage=np.where(is_expert, 99.0, rows.advantage),
        tokens={**rows.tokens, "logprobs": [0 * x if e else x for x, e in pairs]},
    )
    one, changed = (
        Mix().loss(batch_of(Mix().prepare(examples_of(r))), logprobs_of(r)) for r in (rows, other)
    )
    assert one.value.item() == changed.value.item()
    assert {k: v.item() for k, v in one.metrics.items()} == {
        k: v.item() for k, v in changed.metrics.items()
    }


def test_mini_batches_of_a_mixture_add_up_to_the_step() -> None:
    """Parts have the step's proportions: summed with their shares of it they are its loss."""
    rows = ragged(4, rows=8)
    prepared = Mix().prepare(examples_of(rows))
    new_BT = logprobs_of(rows)
    whole = Mix().loss(batch_of(prepared), new_BT).value.item()
    total = 0.0
    for places in ([0, 3, 5], [1, 2, 4, 6, 7]):
        part = prepared.take(places)
        batch = batch_of(part)
        width = batch.mask_BT.shape[1]
        loss = Mix().loss(batch, new_BT[places, :width]).value.item()
        total += loss * part.num_trained_tokens / prepared.num_trained_tokens
    assert total == pytest.approx(whole, rel=1e-12)


def test_mu_of_chord_rises_then_falls_along_half_a_cosine() -> None:
    made = CHORD(mu=0.9, mu_valley=0.1, mu_warmup_steps=4, mu_decay_steps=8)
    mus = [made.mu_of(step) for step in range(1, 15)]
    assert mus[:4] == pytest.approx([0.225, 0.45, 0.675, 0.9])
    half = [0.1 + 0.8 * 0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(9)]
    assert mus[3:12] == pytest.approx(half)
    assert mus[12:] == [0.1, 0.1]
    assert [CHORD(mu=0.4).mu_of(step) for step in (1, 500)] == [0.4, 0.4]
    rising = CHORD(mu=0.4, mu_warmup_steps=2, mu_decay_steps=3)
    assert [rising.mu_of(step) for step in (1, 2, 3, 9)] == pytest.approx([0.2, 0.4, 0.4, 0.4])


def test_the_step_of_a_batch_decides_its_mu() -> None:
    made = CHORD(mu=0.8, mu_valley=0.0, mu_decay_steps=2)
    rows = ragged(0)
    seen = []
    for step in (1, 2, 3):
        batch = batch_of(made.prepare(replace(examples_of(rows), step=step)))
        seen.append(made.loss(batch, logprobs_of(rows)).metrics["mu"].item())
    assert seen == pytest.approx([0.4, 0.0, 0.0])


# in a run


def experts(n: int) -> list[Any]:
    """An expert's rows: no reward, no log-probs, each a group of its own."""
    plain = written(n, source="expert", logprobs=None, reward=None, run_id="teacher")
    return [replace(row, experience_id=f"x{i}", group_id=f"x{i}") for i, row in enumerate(plain)]


MIXED = {
    "own": {"share": 2 / 3},
    "expert": {"share": 1 / 3, "run": "teacher", "sampler": "uniform"},
}


@pytest.mark.parametrize(
    "algorithm", [{"mix": {"mu": 0.9}}, {"chord": {"mu": 0.9, "mu_valley": 0.9, "phi": False}}]
)
def test_an_online_run_trains_on_its_own_rows_and_on_an_experts(
    store: Store, algorithm: dict[str, Any]
) -> None:
    store.append("experiences", experts(1))
    trainer = {"steps": 3, "batch_size": 3, "sampler": {"mixed": MIXED}, "learning_rate": 3e-2}
    explorer = {
        "rewards": "support.tiny_models:share_of_ones",
        "sampling": {"max_tokens": 3},
        "group_size": 3,
    }
    run(store, config(trainer=trainer, algorithm=algorithm, explorer=explorer))
    drawn = table(store, "draws JOIN experiences e USING (experience_id)", "draws.*, e.run_id r")
    assert drawn.filter(pl.col("r") == "teacher")["weight"].to_list() == [1.0] * 3
    assert drawn.filter(pl.col("r") == "demo").height == 3 * 2 * 3
    assert measured(store, "untrainable_rows") == [0.0] * 3
    nll = measured(store, "nll")
    assert nll[0] > nll[1] > nll[2]
    assert all(value != 0 for value in measured(store, "policy_loss")[1:])


def measured(store: Store, name: str) -> list[float]:
    """A metric of the trainer, step by step."""
    return table(store, f"metrics WHERE name = 'train/{name}' ORDER BY step")["value"].to_list()


def test_only_an_algorithm_that_imitates_takes_an_experts_rows_without_logprobs(
    store: Store,
) -> None:
    store.append("experiences", written(4))
    store.append("experiences", [replace(row, reward=1.0) for row in experts(2)])
    trainer = {"batch_size": 2, "steps": 1, "eval_where": "experience_id = 'x1'"}
    run(store, offline(trainer=trainer, algorithm={"mix": {"mu": 1.0}}))
    assert table(store, "draws")["weight"].to_list() == [1.0] * 5
    nll = table(store, "metrics WHERE name = 'eval/nll' ORDER BY step")["value"].to_list()
    assert nll[0] > nll[-1] > 0
    for name, asked in (("held", trainer), ("other", {"batch_size": 3, "steps": 1})):
        with pytest.raises(JobError, match="has no logprobs, and this algorithm needs them"):
            run(store, offline(name=name, trainer=asked, algorithm="grpo"))


def test_both_kinds_of_rows_move_the_policy() -> None:
    model, _ = tiny()
    rows = ragged(1)
    assert 0 < rows.rows["is_expert"].sum() < 6
    made = examples_of(rows)
    made = made.with_tokens(
        **{name: value.float() for name, value in made.tokens.items() if name != "token_ids"},
        token_ids=torch.arange(len(made.tokens["mask"])) % 10 + 3,
    )
    surprises = []
    for mu in (0.0, 0.5):
        model, _ = tiny()
        settings = TrainerConfig(learning_rate=1e-2)
        optimization = Updater(
            Networks(model), Mix(mu=mu), settings, total_steps=9, temperature=1.0, pad_id=0
        )
        seen = [optimization.step(made).metrics["train/nll"] for _ in range(4)]
        surprises.append(seen[0] - seen[-1])
    assert surprises[1] > max(0.5, 2 * surprises[0])


def test_a_weight_that_is_no_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="parameter `mu` of `mix`: input should be less than"):
        resolve({"mix": {"mu": 1.5}})
    with pytest.raises(ConfigError, match="parameter `mu_decay_steps` of `chord`"):
        resolve({"chord": {"mu_decay_steps": -1}})
