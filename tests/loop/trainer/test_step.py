"""One optimizer step, and what it leaves as it was."""

from copy import deepcopy
from itertools import pairwise
from typing import Any

import polars as pl
import pytest
import torch
from support.builders import rows
from support.tiny_models import tiny, weights, written
from transformers import PreTrainedModel

from rlake.loop.algorithms import resolve
from rlake.loop.config import TrainerConfig
from rlake.loop.losses.batch import Examples, examples
from rlake.loop.models.token_logprobs import token_logprobs
from rlake.loop.trainer.networks import Networks
from rlake.loop.trainer.optimizers import rate_share
from rlake.loop.trainer.step import Updater


def ready(n: int = 4, *, response: int = 4) -> Examples:
    frame = rows(written(n, response=response))
    return examples(frame.with_columns(advantage=pl.lit(1.0), weight=pl.lit(1.0)))


def optimization(
    algorithm: str = "sft", *, temperature: float = 1.0, **trainer: Any
) -> tuple[PreTrainedModel, Updater]:
    model, _ = tiny()
    settings = TrainerConfig.model_validate({"learning_rate": 1e-2} | trainer)
    return model, Updater(
        Networks(model),
        resolve(algorithm),
        settings,
        total_steps=10,
        temperature=temperature,
        pad_id=0,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_those_of_the_next_token_and_the_first_has_none(temperature: float) -> None:
    model, _ = tiny()
    row = [3, 13, 4, 14, 7]
    with torch.no_grad():
        found = token_logprobs(model, torch.tensor([row]), temperature=temperature)[0]
        assert found[0] == 0
        for t in range(1, len(row)):
            logits = model(input_ids=torch.tensor([row[:t]])).logits[0, -1]
            expected = torch.log_softmax(logits / temperature, -1)[row[t]]
            assert found[t] == pytest.approx(expected.item(), abs=1e-5)


def test_logprobs_do_not_depend_on_padding_behind() -> None:
    model, _ = tiny()
    with torch.no_grad():
        alone = token_logprobs(model, torch.tensor([[3, 4, 5]]))
        padded = token_logprobs(model, torch.tensor([[3, 4, 5, 0, 0, 0], [6] * 6]))
    torch.testing.assert_close(alone[0], padded[0, :3], atol=1e-6, rtol=0)


def test_a_step_is_that_of_adamw_on_the_mean_loss() -> None:
    model, ours = optimization(weight_decay=0.1, max_grad_norm=1e9)
    other, _ = tiny()
    adam = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1)
    batch = ready().tokens["token_ids"].reshape(4, -1)
    for _ in range(3):
        ours.step(ready())
        adam.zero_grad()
        (-token_logprobs(other, batch)[:, 2:].mean()).backward()
        adam.step()
    torch.testing.assert_close(weights(model), weights(other), atol=1e-5, rtol=1e-4)


def test_an_update_that_is_not_finite_names_its_row_and_leaves_the_weights_as_they_were() -> None:
    model, ours = optimization("grpo")
    before = weights(model)
    logprobs = ready().tokens["logprobs"].clone()
    logprobs[8] = float("nan")
    stepped = ours.step(ready().with_tokens(logprobs=logprobs))
    [fault] = stepped.faults
    assert fault.experience_id == "g000/01"
    assert "logprobs are not all finite" in fault.error
    assert stepped.metrics["train/updates"] == 0
    assert torch.equal(before, weights(model))


def test_a_mini_batch_without_trained_tokens_is_no_update() -> None:
    rows = ready(2)
    mask = rows.tokens["mask"] * (rows.row_N == 0)
    model, ours = optimization(updates={"num_minibatches": 2})
    other, alone = optimization()
    stepped = ours.step(rows.with_tokens(mask=mask)).metrics
    expected = alone.step(rows.take([0])).metrics
    assert stepped["train/updates"] == 1
    assert stepped["train/nll"] == expected["train/nll"]
    assert torch.equal(weights(model), weights(other))


def test_a_step_without_trained_tokens_changes_nothing() -> None:
    model, ours = optimization()
    before = weights(model)
    masked = ready().with_tokens(mask=torch.zeros(24))
    for nothing in (ready().take([]), masked):
        assert ours.step(nothing).metrics == {"train/skipped": 1.0}
    assert torch.equal(before, weights(model))


def test_going_on_from_a_state_is_going_on() -> None:
    one, whole = optimization(lr_scheduler={"name": "cosine", "warmup_steps": 2})
    for _ in range(2):
        whole.step(ready())
    two, resumed = optimization(lr_scheduler={"name": "cosine", "warmup_steps": 2})
    resumed.load(deepcopy(whole.state()))
    assert torch.equal(weights(one), weights(two))
    for _ in range(3):
        assert whole.step(ready()) == resumed.step(ready())
    assert torch.equal(weights(one), weights(two))


def test_measuring_a_loss_learns_nothing() -> None:
    model, ours = optimization()
    before = weights(model)
    first = ours.evaluate([ready(3), ready(4, response=7)])["nll"]
    assert ours.evaluate([ready(3), ready(4, response=7)])["nll"] == first
    assert torch.equal(before, weights(model))
    with torch.no_grad():
        parts = [
            -token_logprobs(model, r.tokens["token_ids"].reshape(len(r), -1))[:, 2:].flatten()
            for r in (ready(3), ready(4, response=7))
        ]
    assert first == pytest.approx(float(torch.cat(parts).mean()), rel=1e-5)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_the_learning_rate_rises_and_then_falls_to_what_is_left(decay: str) -> None:
    given = {"lr_scheduler": {"warmup_steps": 3, "name": decay, "min_lr_ratio": 0.1}}
    settings = TrainerConfig.model_validate(given)
    schedule = settings.lr_scheduler
    shares = [rate_share(step, schedule, total_steps=20) for step in range(20)]
    assert shares[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert all(a >= b for a, b in pairwise(shares[3:]))
    assert 0.1 <= shares[-1] <= (1 if decay == "constant" else 0.2)
    assert rate_share(30, schedule, total_steps=20) == pytest.approx(
        1 if decay == "constant" else 0.1
    )
