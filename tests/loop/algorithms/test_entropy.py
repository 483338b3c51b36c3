"""Which tokens Clip-B and Clip-V leave out, and what is left, against loops in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.losses import Rows, batch_of, examples_of, logprobs_of, ragged
from support.tiny_models import tiny

from rlake.loop.algorithms.clip_b import ClipB
from rlake.loop.algorithms.clip_v import ClipV
from rlake.loop.models.token_logprobs import Scorer


def scores(rows: Rows) -> list[np.ndarray]:
    """The discriminator S = p (H + log p) of each token (arXiv:2602.03392)."""
    pairs = zip(rows.tokens["proximal"], rows.tokens["old_entropy"], strict=True)
    return [np.exp(logp) * (entropy + logp) for logp, entropy in pairs]


def spread(values: list[np.ndarray], rows: Rows) -> tuple[float, float]:
    """Mean and population standard deviation over trained tokens, in two passes."""
    flat = [float(v) for one, mask in zip(values, rows.mask, strict=True) for v in one[mask]]
    mean = sum(flat) / len(flat)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in flat) / len(flat))


def left_out(rows: Rows, kind: str, mu: float) -> list[np.ndarray]:
    """Tokens of a negative advantage that would lower entropy too much."""
    score = scores(rows)
    if kind == "b":
        mean, std = spread(score, rows)
        low = [s - mean < -mu * std for s in score]
    else:
        told = zip(rows.tokens["old_discriminator"], score, strict=True)
        below = [expected - s for expected, s in told]
        _, std = spread(below, rows)
        low = [b > mu * std for b in below]
    return [one & (rows.advantage[i] < 0) & rows.mask[i] for i, one in enumerate(low)]


def expected(rows: Rows, out: list[np.ndarray], clip: float) -> float:
    loss = 0.0
    for i, mask in enumerate(rows.mask):
        for t in np.flatnonzero(mask & ~out[i]):
            ratio = math.exp(rows.new[i][t] - rows.old[i][t])
            bounded = min(max(ratio, 1 - clip), 1 + clip)
            gain = min(ratio * rows.advantage[i], bounded * rows.advantage[i])
            loss -= rows.weight[i] * gain / rows.num_tokens
    return loss


@pytest.mark.parametrize(("kind", "algorithm"), [("b", ClipB(mu=0.5)), ("v", ClipV(mu=0.5))])
def test_tokens_that_lower_entropy_most_are_left_out(kind: str, algorithm: Any) -> None:
    counts = []
    for seed in range(6):
        rows = ragged(seed, rows=9)
        out = left_out(rows, kind, 0.5)
        batch = batch_of(algorithm.prepare(examples_of(rows)), more=2)
        new_BT = logprobs_of(rows, more=2)
        loss = algorithm.loss(batch, new_BT)
        assert loss.value.item() == pytest.approx(expected(rows, out, 0.2), rel=1e-12)
        loss.value.backward()
        assert new_BT.grad is not None
        for i, one in enumerate(out):
            assert not new_BT.grad[i, : len(one)][torch.tensor(one)].any()
        gone = sum(int(one.sum()) for one in out)
        kept = 1 - gone / rows.num_tokens
        assert loss.metrics["kept_fraction"].item() == pytest.approx(kept, rel=1e-12)
        counts.append(gone)
    assert min(counts) < max(counts)


def test_the_expected_discriminator_is_its_mean_over_the_vocabulary() -> None:
    model, _ = tiny()
    tokens = torch.tensor([[3, 13, 4, 5]])
    mask = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    with torch.no_grad():
        found = Scorer(model)(tokens, mask, temperature=0.7, statistics=("discriminator",))
        logits = model(input_ids=tokens).logits[0].double() / 0.7
    for t in (2, 3):
        p = logits[t - 1].softmax(-1).numpy()
        entropy = -sum(x * math.log(x) for x in p)
        wanted = sum(x * x * (entropy + math.log(x)) for x in p)
        assert found["discriminator"][0, t].item() == pytest.approx(wanted, rel=1e-4)
