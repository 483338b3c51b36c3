"""Kahneman-Tversky optimization (KTO), arXiv:2402.01306.

Learns from single answers that are labeled desirable or undesirable, without pairs. With the
implicit reward r = log(pi / pi_reference) of an answer and the reference point z0, the loss is
lambda_D (1 - sigmoid(beta (r - z0))) for a desirable row and lambda_U (1 - sigmoid(beta (z0 - r)))
for an undesirable one (equations 7 and 8): both gains and losses saturate. A row is desirable if
its reward is above `above`.

z0 is max(0, mean of r over prompts with the answers to other prompts), without gradient, for the
policy before the step. A prompt is paired with the answer of the next row by ID with another
prompt, truncated to the length of the step's longest sequence. In a step of one row, z0 is 0.

Metrics: `train/kl_reference` is z0, in nats per sequence, an estimate of KL(pi || pi_reference);
`train/chosen_reward` and `train/rejected_reward` are the means of beta r over desirable and
undesirable rows, `train/reward_margin` their difference; `train/accuracy` is the share of rows
whose r is on the side of z0 where its label wants it.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...operators import Operator, kto_advantage
from ..losses import Algorithm, Loss, Positive
from ..losses.batch import Batch, Examples


@dataclass(frozen=True, kw_only=True)
class KTO(Algorithm):
    """Saturating loss of single rows with a label."""

    likelihoods_at: ClassVar[float | None] = 1.0

    beta: Positive = 0.1
    """How fast gains and losses saturate, per nat."""
    above: float = 0.0
    """Reward above which a row is desirable."""
    desirable_weight: Positive = 1.0
    """The paper's lambda_D."""
    undesirable_weight: Positive = 1.0
    """The paper's lambda_U."""
    balance: Positive | None = None
    """Ratio of the total weights of desirable and undesirable rows in a step.

    The weight of one class is raised to reach it; None: no balancing.
    """

    @property
    def needs(self) -> frozenset[str]:
        """The label, and the reference policy's log-probs."""
        return frozenset({"advantage", "reference"})

    @property
    def companion_needs(self) -> frozenset[str]:
        """Both policies' log-probs."""
        return frozenset({"proximal", "reference"})

    def advantage(self) -> Operator:
        """Give 1 to desirable and -1 to undesirable rows."""
        return kto_advantage(above=self.above)

    def companions(self, rows: Examples) -> Examples | None:
        """Return each prompt with the answer to another."""
        return mismatched(rows) if len(rows) > 1 else None

    def prepare(self, rows: Examples, companions: Examples | None = None) -> Examples:
        """Compute z0, and the weights of both classes."""
        z0 = 0.0
        if companions is not None:
            ratio_N = companions.tokens["proximal"] - companions.tokens["reference"]
            z0 = max(0.0, float(companions.sum_tokens(ratio_N).double().mean()))
        wanted_R = rows.rows["advantage"] > 0
        num_wanted, num_others = float(wanted_R.sum()), float((~wanted_R).sum())
        up = 1.0
        if self.balance is not None and num_wanted and num_others:
            up = self.balance * (self.undesirable_weight * num_others)
            up /= self.desirable_weight * num_wanted
        weights = self.desirable_weight * max(up, 1.0), self.undesirable_weight * max(1 / up, 1.0)
        kind = rows.rows["advantage"].dtype
        weight_R = weights[0] * wanted_R.to(kind) + weights[1] * (~wanted_R).to(kind)
        state = {**rows.state, "kl_reference": z0, "desirable": num_wanted / len(rows)}
        return replace(rows.with_rows(label_weight=weight_R), state=state)

    def loss(self, batch: Batch, logprobs_BT: Tensor) -> Loss:
        """Sigmoid of each row's distance from z0, towards its label's side."""
        z0, wanted_B = batch.state["kl_reference"], batch.rows["advantage"] > 0
        worth_B = batch.sum_tokens(logprobs_BT - batch.tokens["reference"])
        gain_B = torch.where(wanted_B, worth_B - z0, z0 - worth_B)
        losses_B = 1 - torch.sigmoid(self.beta * gain_B)
        value = batch.row_mean(losses_B * batch.rows["label_weight"] * batch.weight_B)
        right_B = (gain_B.detach().sign() + 1) / 2
        message = {"kl_reference": batch.constant(z0), "accuracy": batch.row_mean(right_B)}
        return Loss(value, message | self._rewards(batch, self.beta * worth_B.detach()))

    def _rewards(self, batch: Batch, reward_B: Tensor) -> dict[str, Tensor]:
        """Return the mean implicit reward of each class that has rows in the step."""
        wanted_B, share = batch.rows["advantage"] > 0, batch.state["desirable"]
        message = {}
        if share > 0:
            message["chosen_reward"] = batch.row_mean(reward_B * wanted_B) / share
        if share < 1:
            message["rejected_reward"] = batch.row_mean(reward_B * ~wanted_B) / (1 - share)
        if 0 < share < 1:
            message["reward_margin"] = message["chosen_reward"] - message["rejected_reward"]
        return message


def mismatched(rows: Examples) -> Examples:
    """Return the rows' prompts, each with the answer of another row, in the order of their IDs."""
    starts = rows.starts.tolist()
    token_ids, mask = (rows.tokens[name] for name in ("token_ids", "mask"))
    spans = [slice(starts[i], starts[i + 1]) for i in range(len(rows))]
    cuts = [span.start + int((mask[span] > 0).int().argmax()) for span in spans]
    prompts = [tuple(token_ids[s.start : cut].tolist()) for s, cut in zip(spans, cuts, strict=True)]
    # By ID: the pairs must not depend on the order in which rows were drawn.
    order = sorted(range(len(rows)), key=lambda i: rows.experience_ids[i])
    longest = int(rows.lengths.max())
    made = []
    for own, other in zip(order, _others(order, prompts), strict=True):
        answer = slice(cuts[other], spans[other].stop)
        ids = torch.cat([token_ids[spans[own].start : cuts[own]], token_ids[answer]])
        own_mask = pad(mask[answer], (len(prompts[own]), 0))
        made.append((ids[:longest], own_mask[:longest]))
    return Examples(
        [rows.experience_ids[i] for i in order],
        torch.tensor([len(ids) for ids, _ in made]),
        {
            "token_ids": torch.cat([ids for ids, _ in made]),
            "mask": torch.cat([own_mask for _, own_mask in made]),
        },
        {"weight": torch.ones(len(rows))},
        torch.arange(len(rows)),
        rows.step,
    )


def _others(order: list[int], prompts: list[tuple[int, ...]]) -> list[int]:
    """Return for each row the next, cyclically, with another prompt, or else the next."""
    if len(set(prompts)) == 1:
        return [*order[1:], order[0]]
    found = []
    for place, row in enumerate(order):
        circle = (order[(place + step) % len(order)] for step in range(1, len(order)))
        found.append(next(other for other in circle if prompts[other] != prompts[row]))
    return found
