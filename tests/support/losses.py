"""Ragged rows as plain arrays, and the same rows as tensors: what tests of losses share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from rlake.loop.losses import Algorithm
from rlake.loop.losses.batch import Batch, Examples

NORM = 7.0
"""The constant of seq-mean-token-sum-norm in tests."""
Token = Callable[["Rows", int, int], tuple[float, float]]
"""The loss of token t of row i, and its slope along the log-prob, before any share."""


@dataclass(frozen=True)
class Rows:
    """Rows of float64 numbers: columns of tokens as a list of arrays, columns of rows as arrays."""

    new: list[np.ndarray]
    """Log-probs of the policy that is trained."""
    mask: list[np.ndarray]
    advantage: np.ndarray
    weight: np.ndarray
    tokens: Mapping[str, list[np.ndarray]] = field(default_factory=dict)
    """Other columns of tokens, `logprobs` among them."""
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Other columns of rows."""
    pairs: bool = False
    """Whether rows come as chosen, rejected, chosen, rejected ..."""

    def __len__(self) -> int:
        return len(self.new)

    @property
    def old(self) -> list[np.ndarray]:
        """Log-probs of the policy that wrote the rows."""
        return self.tokens["logprobs"]

    @property
    def num_tokens(self) -> float:
        return float(sum(m.sum() for m in self.mask))


def ragged(seed: int, *, rows: int = 6, spread: float = 0.5, pairs: bool = False) -> Rows:
    """Rows of 3 to 12 tokens, some not trained on in the middle, ratios on both sides of 1.

    Their columns: logprobs, proximal, reference, teacher_logprobs, old_entropy, entropy,
    old_discriminator, old_values, values, token_rewards; of rows: lag, reward, is_expert, and
    group, of three rows each.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 13, rows)
    old = [rng.normal(-2, 1, n) for n in lengths]
    new = [o + rng.normal(0, spread, len(o)) for o in old]
    mask = [rng.random(n) < 0.7 for n in lengths]
    for m in mask:
        m[0], m[-1] = False, True
    advantage, weight = rng.normal(0, 1, rows), rng.uniform(0.2, 2, rows)

    def near(values: list[np.ndarray]) -> list[np.ndarray]:
        return [v + rng.normal(0, spread, len(v)) for v in values]

    tokens = {"logprobs": old, "proximal": near(old), "reference": near(old)}
    tokens |= {"teacher_logprobs": near(old), "values": near([0 * o for o in old])}
    tokens |= {name: [rng.uniform(0, 2, n) for n in lengths] for name in ("entropy", "old_entropy")}
    tokens |= {"old_discriminator": [rng.uniform(-1, 1, n) for n in lengths]}
    tokens |= {
        name: [rng.normal(0, 1, n) for n in lengths] for name in ("old_values", "token_rewards")
    }
    columns = {
        "lag": rng.integers(0, 6, rows).astype(float),
        "reward": rng.normal(0, 1, rows),
        "is_expert": (rng.random(rows) < 0.4).astype(float),
        "group": np.arange(rows) // 3 * 1.0,
    }
    return Rows(new, mask, advantage, weight, tokens, columns, pairs)


def examples_of(rows: Rows) -> Examples:
    """The same rows as a step, in float64: to call `prepare` with."""
    units = np.arange(len(rows)) // 2 if rows.pairs else np.arange(len(rows))
    flat = {name: np.concatenate(values) for name, values in rows.tokens.items()}
    flat["mask"] = np.concatenate(rows.mask).astype(float)
    return Examples(
        [f"e{i}" for i in range(len(rows))],
        torch.tensor([len(n) for n in rows.new]),
        {
            "token_ids": torch.zeros(len(flat["mask"]), dtype=torch.long),
            **{name: torch.tensor(values) for name, values in flat.items()},
        },
        {
            "advantage": torch.tensor(rows.advantage),
            "weight": torch.tensor(rows.weight),
            **{name: torch.tensor(values) for name, values in rows.rows.items()},
        },
        torch.tensor(units),
    )


def padded(rows: Rows, *, more: int = 0) -> tuple[Batch, torch.Tensor]:
    """The same rows as one batch in float64, padded with numbers that must not matter.

    Also the trained policy's log-probs [B, T], ready for a gradient. To see what `prepare` adds,
    call `batch_of(algorithm.prepare(examples_of(rows)))`.
    """
    return batch_of(examples_of(rows), more=more), logprobs_of(rows, more=more)


def prepared(algorithm: Algorithm, seed: int, **how: Any) -> tuple[Batch, torch.Tensor]:
    """Ragged rows as an algorithm prepares them, and the trained policy's log-probs [B, T]."""
    rows = ragged(seed, pairs=algorithm.unit == "pair", **how)
    return batch_of(algorithm.prepare(examples_of(rows))), logprobs_of(rows)


def with_trained(batch: Batch, logprobs_BT: torch.Tensor) -> Batch:
    """Make the columns that networks give with gradient depend on the log-probs, somehow."""
    some_BT = logprobs_BT.square() / 9
    return batch.with_tokens(
        entropy=some_BT, values=some_BT + 0.1 * logprobs_BT, vocabulary=some_BT
    ).with_rows(scores=batch.sum_tokens(some_BT))


def logprobs_of(rows: Rows, *, more: int = 0) -> torch.Tensor:
    """The trained policy's log-probs [B, T], -3 where there is no token."""
    new_BT = torch.full((len(rows), max(map(len, rows.new)) + more), -3.0, dtype=torch.double)
    for i, new in enumerate(rows.new):
        new_BT[i, : len(new)] = torch.tensor(new)
    return new_BT.requires_grad_()


def batch_of(examples: Examples, *, more: int = 0) -> Batch:
    """All rows of a step as one batch, with `more` columns of padding that must not matter."""
    batch = examples.padded(range(len(examples)), totals=examples.totals, pad_id=0)
    pad = torch.nn.functional.pad
    wide = {
        name: pad(value, (0, more), value=0.0 if name in ("mask", "token_ids") else 0.3)
        for name, value in batch.tokens.items()
    }
    return batch.with_tokens(**wide)


def share(rows: Rows, i: int, how: str) -> float:
    """What one token of row i counts in the loss of the step."""
    if how == "token-mean":
        return 1 / rows.num_tokens
    one = 1 / len(rows)
    return {
        "seq-mean-token-mean": one / rows.mask[i].sum(),
        "seq-mean-token-sum": one,
        "seq-mean-token-sum-norm": one / NORM,
    }[how]


def apart(rows: Rows, i: int, t: int) -> float:
    """Log-ratio of a token: of the policy that is trained to the one that wrote it."""
    return float(rows.new[i][t] - rows.old[i][t])


def clipped(ratio: float, credit: float, low: float, high: float) -> tuple[float, float]:
    """Equation 7 of arXiv:1707.06347, negated, and its slope along the log of the ratio."""
    bounded = min(max(ratio, 1 - low), 1 + high)
    is_free = ratio * credit <= bounded * credit
    return -min(ratio * credit, bounded * credit), -ratio * credit if is_free else 0.0


def assert_loss_is(
    algorithm: Algorithm, rows: Rows, token: Token, *, how: str, more: int = 0
) -> Mapping[str, torch.Tensor]:
    """Check a loss and its gradient against what `token` says, and return the metrics."""
    batch = batch_of(algorithm.prepare(examples_of(rows)), more=more)
    new_BT = logprobs_of(rows, more=more)
    loss = algorithm.loss(batch, new_BT)
    loss.value.backward()
    value, gradient = 0.0, np.zeros(tuple(new_BT.shape))
    for i, mask in enumerate(rows.mask):
        for t in np.flatnonzero(mask):
            scale = rows.weight[i] * share(rows, i, how)
            one, slope = token(rows, i, int(t))
            value += scale * one
            gradient[i, t] = scale * slope
    assert loss.value.item() == pytest.approx(value, rel=1e-12, abs=1e-14)
    assert new_BT.grad is not None
    np.testing.assert_allclose(new_BT.grad.numpy(), gradient, rtol=1e-10, atol=1e-14)
    return loss.metrics
