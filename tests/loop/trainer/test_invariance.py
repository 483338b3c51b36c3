"""Law 11: the step is the same however its rows are cut into micro-batches, padded or ordered."""

from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_models import gradients, tiny
from support.updates import LENGTHS, assert_same, rows_of_a_step, step, variants

from rlake.loop.algorithms import names, resolve
from rlake.loop.config import TrainerConfig
from rlake.loop.trainer.micro_batches import plan_micro_batches
from rlake.loop.trainer.networks import Networks
from rlake.loop.trainer.step import Updater


def budget(parts: int) -> int:
    """The token budget that cuts the rows into so many micro-batches."""
    return next(
        b for b in range(1, 1000) if len(plan_micro_batches(LENGTHS, b, packed=True)) == parts
    )


@pytest.mark.parametrize("algorithm", variants())
def test_the_step_does_not_depend_on_how_it_is_cut_ordered_or_padded(algorithm: Any) -> None:
    rows = rows_of_a_step()
    whole = step(algorithm, rows)
    assert_same(whole, step(algorithm, rows, micro_batch_tokens=budget(5)))
    assert_same(whole, step(algorithm, rows, micro_batch_tokens=1))  # alone: no padding at all
    padded = {"packing": False, "pad_id": 7}
    assert_same(whole, step(algorithm, rows, **padded, micro_batch_tokens=budget(2)))
    pairs = np.random.default_rng(1).permutation(len(rows) // 2)
    order = [place for pair in pairs for place in (2 * pair, 2 * pair + 1)]
    assert_same(whole, step(algorithm, rows.take(order), micro_batch_tokens=budget(2)))


@pytest.mark.parametrize("algorithm", names())
def test_what_stands_behind_the_trained_tokens_changes_nothing(algorithm: str) -> None:
    assert_same(step(algorithm, rows_of_a_step()), step(algorithm, rows_of_a_step(longer=3)))


def test_the_gradient_depends_on_the_rows() -> None:
    rows = rows_of_a_step()
    other = rows.with_rows(advantage=-rows.rows["advantage"])
    assert not torch.allclose(step("grpo", rows).gradient, step("grpo", other).gradient, rtol=0.1)


def test_a_long_gradient_is_cut_to_the_norm_allowed_and_reported_as_it_was() -> None:
    model, _ = tiny()
    settings = TrainerConfig(max_grad_norm=1e-3)
    optimization = Updater(
        Networks(model), resolve("sft"), settings, total_steps=1, temperature=1.0, pad_id=0
    )
    measured = optimization.step(rows_of_a_step()).metrics
    assert measured["train/grad_norm"] > 0.1
    assert float(gradients(model).norm()) == pytest.approx(1e-3, rel=1e-3)
