"""Law 11: the step is the same however its rows are cut into micro-batches, padded or ordered."""

from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tiny import gradients, tiny

from rlake.loop.algorithms import names, resolve
from rlake.loop.algorithms.algorithm import Aggregation
from rlake.loop.batch import Examples, plan
from rlake.loop.config import TrainerConfig
from rlake.loop.optimization import Optimization, token_logprobs

LENGTHS = [5, 17, 9, 12, 7, 3, 17, 10, 6, 14]


def variants() -> list[Any]:
    """Every packaged algorithm with every way to aggregate that it has."""
    cases = []
    for name in names():
        known = {f.name for f in fields(resolve(name))}  # type: ignore[arg-type]
        if "aggregation" not in known:
            cases.append(pytest.param({name: {}}, id=name))
            continue
        for how in get_args(Aggregation):
            params = {"aggregation": how, "norm": 11.0 if how.endswith("norm") else None}
            cases.append(pytest.param({name: params}, id=f"{name}-{how}"))
    return cases


def rows_of_a_step() -> Examples:
    """Rows of many lengths, some tokens not trained on, sampled by a policy that is a bit older."""
    rng = np.random.default_rng(0)
    model, tokenizer = tiny()
    tokens = [rng.integers(3, len(tokenizer), n).tolist() for n in LENGTHS]
    masks = [[False, *(rng.random(n - 2) < 0.7).tolist(), True] for n in LENGTHS]
    logprobs = []
    with torch.no_grad():
        for row in tokens:
            true = token_logprobs(model, torch.tensor([row]))[0].numpy()
            logprobs.append((true + rng.normal(0, 0.3, len(row))).tolist())
    return Examples(
        [f"e{i}" for i in range(len(tokens))],
        tokens,
        masks,
        logprobs,
        rng.normal(0, 1, len(tokens)).tolist(),
        rng.uniform(0.5, 1.5, len(tokens)).tolist(),
    )


@dataclass(frozen=True)
class Step:
    """What a step did: its gradient, the weights after it, and what it measured."""

    gradient: torch.Tensor
    weights: torch.Tensor
    measured: dict[str, float]


def step(
    algorithm: Any, rows: Examples, *, micro_batch_tokens: int = 10_000, pad_id: int = 0
) -> Step:
    """Take one step on a fresh copy of the same model."""
    model, _ = tiny()
    settings = TrainerConfig(
        learning_rate=1e-2, max_grad_norm=1e9, micro_batch_tokens=micro_batch_tokens
    )
    optimization = Optimization(
        model, resolve(algorithm), settings, total_steps=3, temperature=0.9, pad_id=pad_id
    )
    measured = optimization.step(rows).metrics
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return Step(gradients(model), weights, measured)


def assert_same(one: Step, other: Step) -> None:
    scale = float(one.gradient.abs().max())
    assert scale > 1e-4
    assert float((one.gradient - other.gradient).abs().max()) <= 1e-5 * scale
    assert one.measured == pytest.approx(other.measured, rel=1e-5, abs=1e-6)


def budget(parts: int) -> int:
    """The token budget that cuts the rows into so many micro-batches."""
    return next(b for b in range(1, 1000) if len(plan(LENGTHS, b)) == parts)


@pytest.mark.parametrize("algorithm", variants())
def test_the_step_does_not_depend_on_how_it_is_cut_ordered_or_padded(algorithm: Any) -> None:
    rows = rows_of_a_step()
    whole = step(algorithm, rows)
    for parts in (2, 5):
        assert_same(whole, step(algorithm, rows, micro_batch_tokens=budget(parts)))
    assert_same(whole, step(algorithm, rows, micro_batch_tokens=1))  # alone: no padding at all
    assert_same(whole, step(algorithm, rows, pad_id=7))
    order = np.random.default_rng(1).permutation(len(rows))
    shuffled = Examples(*([getattr(rows, f.name)[i] for i in order] for f in fields(rows)))
    assert_same(whole, step(algorithm, shuffled, micro_batch_tokens=budget(2)))


@pytest.mark.parametrize("algorithm", names())
def test_what_stands_behind_the_trained_tokens_changes_nothing(algorithm: str) -> None:
    rows = rows_of_a_step()
    assert rows.logprobs is not None
    longer = replace(
        rows,
        token_ids=[[*t, 5, 6, 7] for t in rows.token_ids],
        masks=[[*m, False, False, False] for m in rows.masks],
        logprobs=[[*x, -9.0, -9.0, -9.0] for x in rows.logprobs],
    )
    assert_same(step(algorithm, rows), step(algorithm, longer))


def test_the_gradient_depends_on_the_rows() -> None:
    rows = rows_of_a_step()
    other = replace(rows, advantages=[-a for a in rows.advantages])
    assert not torch.allclose(step("grpo", rows).gradient, step("grpo", other).gradient, rtol=0.1)


def test_a_long_gradient_is_cut_to_the_norm_allowed_and_reported_as_it_was() -> None:
    model, _ = tiny()
    settings = TrainerConfig(max_grad_norm=1e-3)
    optimization = Optimization(
        model, resolve("sft"), settings, total_steps=1, temperature=1.0, pad_id=0
    )
    measured = optimization.step(rows_of_a_step()).metrics
    assert measured["train/grad_norm"] > 0.1
    assert float(gradients(model).norm()) == pytest.approx(1e-3, rel=1e-3)
