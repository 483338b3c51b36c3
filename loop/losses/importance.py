"""Off-policy correction: importance weights and masks for rows of older or other policies."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ...store.errors import ConfigError
from .algorithm import NonNegative, Positive, bounded
from .batch import Batch, Examples

Level = Literal["token", "sequence", "geometric"]

MEASURED = "correction/"
"""Prefix of the names in a step's state that describe its weights."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """How a loss corrects for rows that another policy sampled.

    Weights are pi_proximal/pi_behavior, without gradient: pi_proximal is the policy before the
    step, pi_behavior the one that sampled, as stored. They correct for staleness and for an engine
    whose log-probs differ from the trainer's. Losses with a ratio then take it to pi_proximal, so
    that nothing is corrected twice: the decoupled objective of arXiv:2505.24298.

    `level` is the unit of the weights: each `token` alone (biased, low variance); the `sequence`,
    the product over its trained tokens; or `geometric`, the geometric mean over them (as in
    arXiv:2507.18071). A masked token has weight 0 but still counts in the mean over tokens: the
    others are not scaled up.

    Metrics: `train/importance` is the mean weight of a trained token, `train/importance_truncated`
    the share of tokens whose weight was above `cap`, `train/importance_masked` that of tokens
    masked out, `train/importance_ess` the effective sample size (sum of weights, squared, divided
    by the sum of squared weights) as a share of the tokens: 1 when all count the same.
    """

    decoupled: bool = False
    """Whether the trust region is around the policy before the step, not the sampling policy."""
    weights: Level | Literal["none"] | None = None
    """Importance weights; None: per token if decoupled, else none."""
    cap: Positive | None = 2.0
    """Largest weight (TIS); None: no limit."""
    mask: Level = "token"
    """The unit of the ratio by which tokens are masked."""
    mask_below: NonNegative = 0.0
    """Smallest ratio that is not masked."""
    mask_above: Positive | None = None
    """Largest ratio that is not masked; None: no limit."""
    half_life: Positive | None = None
    """Lag, in training steps, at which a row counts half; rows of unknown lag count in full."""

    def __post_init__(self) -> None:
        """Raise ConfigError for an empty range."""
        if self.mask_above is not None and self.mask_above <= self.mask_below:
            raise ConfigError(
                f"`correction.mask_above` {self.mask_above:g} is not above "
                f"`correction.mask_below` {self.mask_below:g}: every token would be masked out"
            )

    @property
    def level(self) -> Level | None:
        """The unit of the importance weights, None without weights."""
        if self.weights is None:
            return "token" if self.decoupled else None
        return None if self.weights == "none" else self.weights

    @property
    def is_masked(self) -> bool:
        """Whether ratios outside a range are masked."""
        return self.mask_below > 0 or self.mask_above is not None

    @property
    def is_decoupled(self) -> bool:
        """Whether ratios are taken to the policy before the step."""
        return self.decoupled or self.level is not None

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads."""
        is_measured = self.is_decoupled or self.is_masked
        return frozenset({"logprobs"} | ({"proximal"} if is_measured else set()))

    def prepare(self, rows: Examples) -> Examples:
        """Add the column `correction`, a factor of each token's loss, if anything is corrected."""
        if self.level is None and not self.is_masked and self.half_life is None:
            return rows
        found: dict[str, Tensor] = {}
        weight = torch.ones_like(rows.tokens["mask"])
        if self.level is not None:
            weight = _ratio(rows, self.level)
            if self.cap is not None:
                found["importance_truncated"] = (weight > self.cap).to(weight.dtype)
                weight = weight.clamp(max=self.cap)
        if self.is_masked:
            # Computed anew: `weight` is truncated, and may be at another level.
            ratio, top = _ratio(rows, self.mask), self.mask_above or torch.inf
            out = (ratio < self.mask_below) | (ratio > top)
            found["importance_masked"] = out.to(weight.dtype)
            weight = weight.masked_fill(out, 0.0)
        if self.half_life is not None and "lag" in rows.rows:
            weight = weight * _freshness(rows.rows["lag"], self.half_life)[rows.row_N]
        return _described(rows.with_tokens(correction=weight), found | {"importance": weight})

    def old(self, batch: Batch) -> Tensor:
        """Return the log-probs of the policy that ratios are taken to: [B, T]."""
        return batch.tokens["proximal"] if self.is_decoupled else batch.logprobs_BT

    def metrics(self, batch: Batch) -> dict[str, Tensor]:
        """Return the metrics of the step's weights, which `prepare` computed."""
        names = [name for name in batch.state if name.startswith(MEASURED)]
        return {n.removeprefix(MEASURED): batch.constant(batch.state[n]) for n in names}


def _ratio(rows: Examples, level: Level) -> Tensor:
    """Return pi_proximal/pi_behavior of each token, or of its sequence: [N]."""
    mask = rows.tokens["mask"]
    log = (rows.tokens["proximal"] - rows.tokens["logprobs"]) * mask
    if level != "token":
        sums = rows.sum_tokens(log)
        if level == "geometric":
            sums = sums / rows.sum_tokens(mask).clamp(min=1)
        log = sums[rows.row_N]
    return bounded(log).exp()


def _freshness(lag: Tensor, half_life: float) -> Tensor:
    """Return the factor of each row by its lag, at most 1: [R]."""
    return torch.exp2(-torch.nan_to_num(lag, nan=0.0).clamp(min=0.0) / half_life)


def _described(rows: Examples, columns: dict[str, Tensor]) -> Examples:
    """Add means over the step's trained tokens, and the effective sample size, to the state."""
    is_trained = rows.tokens["mask"] > 0
    weight = columns["importance"][is_trained].double()
    found = {name: column[is_trained].double().mean() for name, column in columns.items()}
    found["importance_ess"] = weight.sum() ** 2 / (len(weight) * (weight**2).sum())
    # 0 and not NaN for a step without trained tokens
    noted = {f"{MEASURED}{name}": float(torch.nan_to_num(value)) for name, value in found.items()}
    return replace(rows, state={**rows.state, **noted})
