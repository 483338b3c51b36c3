"""KTO against the paper's formulas, in float64 without torch: labels, z0, loss and gradient."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.losses import Rows, batch_of, examples_of, logprobs_of, ragged
from support.tiny_models import metric, offline, table, written

from rlake.loop.algorithms import resolve
from rlake.loop.algorithms.kto import KTO, mismatched
from rlake.loop.losses.batch import Examples
from rlake.loop.run import run
from rlake.store import Store


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def worth(rows: Rows, i: int) -> float:
    """log pi / pi_reference of a row."""
    trained = np.flatnonzero(rows.mask[i])
    return sum(float(rows.new[i][t] - rows.tokens["reference"][i][t]) for t in trained)


def expected(
    rows: Rows, z0: float, beta: float, good: float, bad: float
) -> tuple[float, np.ndarray]:
    """Equations 7 and 8 of arXiv:2402.01306, and the derivative in closed form."""
    loss, gradient = 0.0, np.zeros((len(rows), max(map(len, rows.new))))
    for i, label in enumerate(rows.advantage):
        sign, weight = (1, good) if label > 0 else (-1, bad)
        value = weight * sigmoid(beta * sign * (worth(rows, i) - z0))
        scale = rows.weight[i] / len(rows)
        loss += scale * (weight - value)
        slope = -scale * value * (1 - value / weight) * beta * sign
        gradient[i, : len(rows.mask[i])] = slope * rows.mask[i]
    return loss, gradient


def companions(ratios: np.ndarray) -> Examples:
    """Sequences of one trained token, whose policies' log-probs differ by so much."""
    size = len(ratios)
    tokens = {"proximal": torch.tensor(ratios), "reference": torch.zeros(size).double()}
    return Examples(
        [f"c{i}" for i in range(size)],
        torch.ones(size, dtype=torch.long),
        {"mask": torch.ones(size).double(), **tokens},
        {},
        torch.arange(size),
    )


@pytest.mark.parametrize("mean_ratio", [1.5, -2.0])
@pytest.mark.parametrize("balance", [None, 1.0, 4 / 3])
def test_the_loss_and_its_gradient_are_those_of_the_paper(
    mean_ratio: float, balance: float | None
) -> None:
    spec = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7, "balance": balance}
    algorithm = resolve({"kto": spec})
    for seed in range(4):
        rows = ragged(seed, rows=7)
        rows = replace(rows, advantage=np.array([1.0, -1, -1, 1, -1, -1, -1]))
        ratios = np.random.default_rng(seed).normal(mean_ratio, 0.3, 7)
        ready = algorithm.prepare(examples_of(rows), companions(ratios))
        batch, new_BT = batch_of(ready, more=seed), logprobs_of(rows, more=seed)
        loss = algorithm.loss(batch, new_BT)
        loss.value.backward()
        z0, good, bad = max(0.0, ratios.mean()), 1.2, 0.7
        if balance is not None:  # two desirable rows, five others
            factor = balance * 5 * bad / (2 * good)
            good, bad = good * max(factor, 1), bad * max(1 / factor, 1)
            assert 2 * good == pytest.approx(balance * 5 * bad)
        value, gradient = expected(rows, z0, 0.3, good, bad)
        assert loss.value.item() == pytest.approx(value, rel=1e-12)
        assert new_BT.grad is not None
        found = new_BT.grad.numpy()
        np.testing.assert_allclose(found[:, : gradient.shape[1]], gradient, rtol=1e-9, atol=1e-15)
        told = {name: m.item() for name, m in loss.metrics.items()}
        values = [worth(rows, i) for i in range(7)]
        wanted = [0.3 * values[i] for i in (0, 3)]
        others = [0.3 * values[i] for i in (1, 2, 4, 5, 6)]
        right = [(v > z0) == (a > 0) for v, a in zip(values, rows.advantage, strict=True)]
        assert told == pytest.approx(
            {
                "kl_reference": z0,
                "accuracy": np.mean(right),
                "chosen_reward": np.mean(wanted),
                "rejected_reward": np.mean(others),
                "reward_margin": np.mean(wanted) - np.mean(others),
            },
            rel=1e-12,
        )


def test_of_a_class_without_rows_nothing_is_said() -> None:
    rows = replace(ragged(0), advantage=np.ones(6))
    algorithm = KTO(balance=1.0)
    loss = algorithm.loss(batch_of(algorithm.prepare(examples_of(rows))), logprobs_of(rows))
    assert math.isfinite(loss.value.item())
    assert loss.metrics.keys() == {"kl_reference", "accuracy", "chosen_reward"}


def step_of(prompts: list[list[int]], answers: list[list[int]]) -> Examples:
    """Rows of a prompt and an answer, whose first token is not trained on."""
    ids = [p + a for p, a in zip(prompts, answers, strict=True)]
    masks = [
        [0.0] * len(p) + [1.0] * (len(a) > 0) + [0.5] * (len(a) - 1)
        for p, a in zip(prompts, answers, strict=True)
    ]
    return Examples(
        [f"e{i}" for i in range(len(ids))],
        torch.tensor([len(row) for row in ids]),
        {
            "token_ids": torch.tensor([i for row in ids for i in row]),
            "mask": torch.tensor([m for row in masks for m in row]),
        },
        {"weight": torch.ones(len(ids))},
        torch.arange(len(ids)),
    )


def taken_apart(rows: Examples) -> list[tuple[list[int], list[float]]]:
    parts = zip(
        rows.tokens["token_ids"].split(rows.lengths.tolist()),
        rows.tokens["mask"].split(rows.lengths.tolist()),
        strict=True,
    )
    return [(ids.tolist(), mask.tolist()) for ids, mask in parts]


def test_each_prompt_gets_the_answer_to_another_and_no_longer_than_the_longest_row() -> None:
    rows = step_of([[3], [3], [4, 5], [6]], [[7, 1], [8, 9, 1], [10, 1], [11, 12, 13, 14, 1]])
    assert taken_apart(mismatched(rows)) == [
        ([3, 10, 1], [0.0, 1.0, 0.5]),
        ([3, 10, 1], [0.0, 1.0, 0.5]),
        ([4, 5, 11, 12, 13, 14], [0.0, 0.0, 1.0, 0.5, 0.5, 0.5]),
        ([6, 7, 1], [0.0, 1.0, 0.5]),
    ]
    assert taken_apart(mismatched(rows)) == taken_apart(mismatched(rows.take([2, 0, 3, 1])))


def test_rows_of_one_prompt_get_each_others_answers_and_one_row_none() -> None:
    rows = step_of([[3], [3], [3]], [[7], [8], [9]])
    assert [ids for ids, _ in taken_apart(mismatched(rows))] == [[3, 8], [3, 9], [3, 7]]
    assert KTO().companions(rows.take([0])) is None


def test_rows_are_labelled_by_their_reward_and_those_without_one_are_left_out(store: Store) -> None:
    rewards = [0.2, 0.9, None, 0.5]
    rows = [replace(row, reward=r) for row, r in zip(written(4), rewards, strict=True)]
    store.append("experiences", rows)
    run(store, offline(algorithm={"kto": {"above": 0.5}}, trainer={"batch_size": 4}))
    drawn = table(store, "draws ORDER BY position", "experience_id, advantage, weight").rows()
    assert [(a, w) for _, a, w in drawn] == [(-1.0, 1.0), (1.0, 1.0), (None, 0.0), (-1.0, 1.0)]
    assert metric(store, "train/kl_reference")[1] == pytest.approx(0.0, abs=1e-5)
    assert metric(store, "train/accuracy") == {1: pytest.approx(0.5)}


def test_held_out_rows_are_labelled_and_measured(store: Store) -> None:
    store.append("experiences", written(12))
    settings: dict[str, Any] = {"batch_size": 8, "max_uses": 30, "learning_rate": 1e-2}
    settings["eval_where"] = "group_id = 'g002'"
    run(store, offline(algorithm="kto", trainer=settings))
    found = metric(store, "eval/accuracy")
    assert set(found) == {0, 30}
    assert metric(store, "eval/loss")[0] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.slow
def test_loss_and_gradient_are_those_of_trl() -> None:
    from support.trl_losses import kto_of_trl

    for seed in range(3):
        rows = ragged(seed, rows=7)
        rows = replace(rows, weight=np.ones(7), advantage=np.array([1.0, -1, -1, 1, -1, 1, -1]))
        ratios = np.random.default_rng(seed).normal(0.4, 0.3, 7)
        algorithm = KTO(beta=0.2, desirable_weight=1.3, undesirable_weight=0.9)
        ready = algorithm.prepare(examples_of(rows), companions(ratios))
        ours_BT, theirs_BT = logprobs_of(rows), logprobs_of(rows)
        ours = algorithm.loss(batch_of(ready), ours_BT).value
        theirs = kto_of_trl(rows, theirs_BT, ratios, beta=0.2, weights=(1.3, 0.9))
        ours.backward()
        theirs.backward()
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
        assert ours_BT.grad is not None
        assert theirs_BT.grad is not None
        torch.testing.assert_close(ours_BT.grad, theirs_BT.grad, rtol=1e-5, atol=1e-9)
