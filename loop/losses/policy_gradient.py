"""What policy-gradient algorithms share: surrogates, ratios, penalties, correction, aggregation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
import polars as pl
import torch
from torch import Tensor

from ...operators import Operator
from ...operators import resolve as resolve_operator
from ...operators.parameters import Key
from ...store.errors import ConfigError, OperatorError
from .algorithm import Aggregation, Algorithm, Count, Loss, Positive, Unit, aggregate, bounded
from .batch import Batch, Examples
from .importance import Correction
from .kl import KL, k3

NamedPart = str | dict[str, dict[str, Any] | None]
"""A part of an algorithm: `name`, or `{name: {parameter: value}}`."""
Credit = Annotated[NamedPart | None, Key("advantage")]
"""The operator that computes advantages. A method has the name of its key."""


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Algorithm):
    """A loss of tokens from their advantage; a subclass defines it in `surrogate`.

    Metrics of all: `train/ratio` is the mean of pi/pi_old over trained tokens, each from exp(-20)
    to exp(20); `train/kl` the k3 estimate of KL(pi_old || pi), in nats per token; `train/entropy`
    the mean of -log pi of the sampled tokens, which estimates the entropy on policy, or with an
    entropy bonus the mean of the entropy itself; `train/mismatch_kl`, if the log-probs before the
    step are computed, the k3 estimate of KL(pi_behavior || pi_proximal), which on policy is the
    mismatch between engine and trainer; `train/kl_reference` the estimate of KL(pi ||
    pi_reference), if it is penalized; `train/kl_coef` the penalty per nat of it.
    """

    unit: ClassVar[Unit] = "group"

    group_size: Count = 8
    credit: Credit = None
    """The operator that computes advantages; None: the algorithm's own."""
    aggregation: Aggregation = "token-mean"
    """How losses of tokens are reduced to one number."""
    norm: Positive | None = None
    """The constant of seq-mean-token-sum-norm."""
    kl: KL = field(default_factory=KL)
    """Penalty on the divergence from the reference policy."""
    entropy_coef: float = 0.0
    """Bonus per nat of entropy."""
    correction: Correction = field(default_factory=Correction)
    """Off-policy correction."""

    def __post_init__(self) -> None:
        """Raise ConfigError for an operator that sets no advantage, or an unread KL penalty."""
        if self.credit is not None:
            self._check_credit()
        if not self.kl.is_charged:
            return
        credit, name = self.advantage(), type(self).__name__
        if credit is None and "reward" not in self.needs:
            raise ConfigError(f"`{name}` reads no reward; `kl.part_of` can only be `loss`")
        others = set(credit.reads) - _CREDITED if credit else set()
        if credit and (others or credit.reads_all):
            raise ConfigError(
                f"`{name}` credits rows by `{credit.name}`, which reads "
                f"{', '.join(f'`{c}`' for c in sorted(others)) or 'all columns'} besides the "
                "reward and its group; `kl.part_of` can only be `loss`"
            )

    def _check_credit(self) -> None:
        name, given = type(self).__name__, PolicyGradient.advantage
        try:
            found = given(self)
        except OperatorError as error:
            raise ConfigError(f"`advantage` of `{name}`: {error}") from error
        if found is None or "advantage" not in found.writes:
            raise ConfigError(
                f"`advantage` of `{name}`: the operator `{found}` does not set the column "
                "`advantage`, as `group_zscore` does; `rlake operators` lists all"
            )
        if str(self.advantage()) != str(found):
            raise ConfigError(
                f"`{name}` computes its own advantage, `{self.advantage()}`; take "
                "`policy_gradient`, in which a loss and an advantage are named"
            )

    def advantage(self) -> Operator | None:
        """Return the configured operator."""
        return None if self.credit is None else resolve_operator(self.credit)

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads."""
        own = {"advantage"} | ({"entropy"} if self.entropy_coef else set())
        return frozenset(own) | self.kl.needs | self.correction.needs

    def prepare(self, rows: Examples, companions: Examples | None = None) -> Examples:
        """Subtract the KL penalty from rewards if it is part of them; add the correction."""
        del companions
        credit = self.advantage() if self.kl.is_charged else None
        # Held-out rows have no group: they are only evaluated.
        if credit is not None and "group" in rows.rows:
            less = rows.sum_tokens(self.kl.charged(rows))
            rows = rows.with_rows(advantage=_credited(rows, credit, less))
        return self.correction.prepare(rows)

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each token [B, T], and metrics without gradient."""
        raise NotImplementedError(f"`{type(self).__name__}` has no surrogate")

    def loss(self, batch: Batch, logprobs_BT: Tensor) -> Loss:
        """Return the corrected surrogate plus penalties."""
        old_BT = self.correction.old(batch)
        losses_BT, metrics = self.surrogate(batch, logprobs_BT, old_BT)
        if "correction" in batch.tokens:
            losses_BT = losses_BT * batch.tokens["correction"]
        value = self.aggregate(losses_BT, batch)
        metrics |= _measured(batch, logprobs_BT.detach(), old_BT) | self.correction.metrics(batch)
        if self.kl.coef:
            coef = self.kl.coefficient(batch.state)
            kl_BT = self.divergence(batch, logprobs_BT)
            if self.kl.part_of == "loss":
                # Without the weights of `correction`: an estimator that needs
                # weights brings its own.
                value = value + coef * self.aggregate(kl_BT, batch)
            metrics["kl_reference"] = batch.token_mean(kl_BT.detach())
            metrics["kl_coef"] = batch.constant(coef)
        if self.entropy_coef:
            entropy_BT = batch.tokens["entropy"]
            value = value - self.entropy_coef * self.aggregate(entropy_BT, batch)
            metrics["entropy"] = batch.token_mean(entropy_BT.detach())
        return Loss(value, metrics)

    def divergence(self, batch: Batch, logprobs_BT: Tensor) -> Tensor:
        """Return the estimate of KL(pi || pi_reference) at each token: [B, T]."""
        return self.kl.estimate(
            logprobs_BT, batch.tokens["reference"], batch.tokens.get("logprobs")
        )

    def adapt(self, state: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the state with the next step's KL coefficient."""
        return self.kl.adapt(state, metrics.get("kl_reference"))

    def aggregate(self, losses_BT: Tensor, batch: Batch) -> Tensor:
        """Reduce losses of tokens to one number, as configured."""
        return aggregate(losses_BT, batch, self.aggregation, norm=self.norm)


@dataclass(frozen=True, kw_only=True)
class Clipped(PolicyGradient):
    """Ratio times advantage, with a clipped ratio (arXiv:1707.06347, equation 7).

    Metrics of all: `train/clip_fraction` is the share of tokens whose ratio left the trusted range
    on the side where that stops the gradient.
    """

    clip: Positive = 0.2
    """How far below 1 the ratio may push."""
    clip_high: Positive | None = None
    """How far above 1; None: as far as below."""

    def ratio(self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor) -> Tensor:
        """Return the ratio of each trained token: [B, T]."""
        return ratio(batch, logprobs_BT, old_BT)

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Clipped surrogate, negated."""
        ratio_BT, advantage_BT = self.ratio(batch, logprobs_BT, old_BT), batch.advantage_BT
        low, high = self.clip, self.clip if self.clip_high is None else self.clip_high
        bounded_BT = ratio_BT.clamp(1 - low, 1 + high)
        # The smaller of both, not the clipped one alone: a token that an update has pushed the
        # wrong way keeps the gradient that brings it back.
        gain_BT = torch.minimum(ratio_BT * advantage_BT, bounded_BT * advantage_BT)
        up_BT = (ratio_BT > 1 + high) & (advantage_BT > 0)
        down_BT = (ratio_BT < 1 - low) & (advantage_BT < 0)
        stopped = batch.token_mean((up_BT | down_BT).to(ratio_BT.dtype))
        return -gain_BT, {"clip_fraction": stopped}


@dataclass(frozen=True, kw_only=True)
class Unclipped(PolicyGradient):
    """REINFORCE's loss of whole answers: log-probability times advantage, without a ratio."""

    aggregation: Aggregation = "seq-mean-token-sum"

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probability times advantage, negated."""
        del old_BT  # no ratio: the policy that sampled the rows does not matter
        return -batch.advantage_BT * logprobs_BT, {}


def ratio(batch: Batch, logprobs_BT: Tensor, old_BT: Tensor) -> Tensor:
    """Return pi/pi_old of each trained token, bounded, and 1 elsewhere: [B, T]."""
    return bounded((logprobs_BT - old_BT) * batch.mask_BT).exp()


_CREDITED = frozenset({"experience_id", "group_id", "reward"})
"""Columns of a step's rows that are available when advantages are computed again."""


def compares(algorithm: Algorithm) -> bool:
    """Return whether a row that is alone in its group always has advantage 0.

    False for an operator that reads more than rewards, of which it is unknown.
    """
    credit = algorithm.advantage()
    if credit is None or not credit.whole_groups or set(credit.reads) - _CREDITED:
        return False
    alone = pl.LazyFrame({"experience_id": ["a"], "group_id": ["g"], "reward": [1.0]})
    return credit(alone).collect(engine="in-memory")["advantage"].to_list() == [0.0]


def _credited(rows: Examples, credit: Operator, less_R: Tensor) -> Tensor:
    """Return the advantages of rows after a penalty on their rewards: [R].

    Statistics of groups are over the rows that are trained on.
    """
    reward = (rows.rows["reward"].double() - less_R.double()).numpy()
    # A missing reward is NaN in tensors; as NULL it stays out of its group's statistics.
    frame = pl.DataFrame(
        {
            "experience_id": rows.experience_ids,
            "group_id": rows.rows["group"].long().numpy(),
            "reward": pl.Series(reward, nan_to_null=True),
        }
    )
    # The streaming engine sums in another order, and a resumed run must be bit-identical.
    found = credit(frame.lazy()).collect(engine="in-memory")
    advantage = found["advantage"].fill_null(0.0).to_numpy().astype(np.float64)
    return torch.tensor(advantage, dtype=rows.rows["advantage"].dtype)


@torch.no_grad()
def _measured(batch: Batch, logprobs_BT: Tensor, old_BT: Tensor) -> dict[str, Tensor]:
    ratio_BT = ratio(batch, logprobs_BT, old_BT)
    found = {
        "ratio": batch.token_mean(ratio_BT),
        "kl": _k3(batch, logprobs_BT, old_BT),
        "entropy": batch.token_mean(-logprobs_BT),
    }
    if "proximal" in batch.tokens and "logprobs" in batch.tokens:
        found["mismatch_kl"] = _k3(batch, batch.tokens["proximal"], batch.logprobs_BT)
    return found


def _k3(batch: Batch, logprobs_BT: Tensor, old_BT: Tensor) -> Tensor:
    """Return the mean k3 estimate of KL(old || new) over trained tokens."""
    return batch.token_mean(k3(bounded((old_BT - logprobs_BT) * batch.mask_BT)))
