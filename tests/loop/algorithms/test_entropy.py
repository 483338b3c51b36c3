"""Which tokens Clip-B and Clip-V leave out, and what is left, against loops in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.losses import Rows, apart, assert_loss_is, clipped, ragged
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


@pytest.mark.parametrize(("kind", "algorithm"), [("b", ClipB(mu=0.5)), ("v", ClipV(mu=0.5))])
def test_tokens_that_lower_entropy_most_are_left_out(kind: str, algorithm: Any) -> None:
    counts = []
    for seed in range(6):
        rows = ragged(seed, rows=9)
        out = left_out(rows, kind, 0.5)

        def token(rows: Rows, i: int, t: int, out: list[np.ndarray] = out) -> tuple[float, float]:
            kept = clipped(math.exp(apart(rows, i, t)), rows.advantage[i], 0.2, 0.2)
            return (0.0, 0.0) if out[i][t] else kept

        found = assert_loss_is(algorithm, rows, token, how="token-mean", more=2)
        gone = sum(int(one.sum()) for one in out)
        assert found["kept_fraction"].item() == pytest.approx(1 - gone / rows.num_tokens, rel=1e-12)
        counts.append(gone)
    assert min(counts) < max(counts)


@pytest.mark.parametrize("share", [1e-4, 0.05, 0.5])
def test_no_more_than_a_share_of_the_tokens_is_left_out_the_furthest_first(share: float) -> None:
    for seed in range(4):
        rows = ragged(seed, rows=9)
        score = scores(rows)
        below = [e - s for e, s in zip(rows.tokens["old_discriminator"], score, strict=True)]
        out = left_out(rows, "v", 0.5)
        places = [(i, int(t)) for i, one in enumerate(out) for t in np.flatnonzero(one)]
        places.sort(key=lambda place: -below[place[0]][place[1]])
        gone = set(places[: max(1, int(share * rows.num_tokens))])

        def token(
            rows: Rows, i: int, t: int, gone: set[tuple[int, int]] = gone
        ) -> tuple[float, float]:
            kept = clipped(math.exp(apart(rows, i, t)), rows.advantage[i], 0.2, 0.2)
            return (0.0, 0.0) if (i, t) in gone else kept

        assert gone
        assert_loss_is(ClipV(mu=0.5, max_fraction=share), rows, token, how="token-mean", more=2)


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
