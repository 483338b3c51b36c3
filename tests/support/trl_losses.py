"""Losses that TRL's own trainers compute from log-probs that are given, in place of a model's."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from support.losses import Rows
from torch import Tensor


def _accelerator() -> SimpleNamespace:
    """One process: gathering gives back what it is given."""
    return SimpleNamespace(
        device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x
    )


def _mask(rows: Rows) -> Tensor:
    mask = np.zeros((len(rows), max(map(len, rows.new))), dtype=np.int64)
    for i, m in enumerate(rows.mask):
        mask[i, : len(m)] = m
    return torch.tensor(mask)


def _sums(rows: Rows, name: str) -> Tensor:
    columns = rows.tokens[name]
    return torch.tensor([v[m].sum() for v, m in zip(columns, rows.mask, strict=True)])


class _Model:
    """Says given log-probs of tokens, as TRL's fused head does."""

    training = True

    def __init__(self, logprobs_BT: Tensor) -> None:
        self.logprobs_BT = logprobs_BT

    def __call__(self, **_: Any) -> SimpleNamespace:
        known = self.logprobs_BT[:, 1:]
        zeros = torch.zeros_like(known)
        return SimpleNamespace(
            log_probs=known, entropy=zeros, mean_logits=zeros, is_top1=zeros > 0, loss=None
        )


def _trainer(**settings: Any) -> SimpleNamespace:
    return SimpleNamespace(
        accelerator=_accelerator(),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )


def dpo_of_trl(
    rows: Rows, logprobs_BT: Tensor, kind: str, *, beta: float, smoothing: float = 0.0
) -> Tensor:
    """The loss of TRL's DPOTrainer; its batches have all chosen rows first."""
    from trl.trainer.dpo_trainer import DPOTrainer

    order = torch.tensor([*range(0, len(rows), 2), *range(1, len(rows), 2)])
    mask_BT = _mask(rows)[order]
    model = _Model((logprobs_BT * _mask(rows))[order])
    chosen, rejected = _sums(rows, "reference")[order].chunk(2)
    trainer = _trainer(
        model=model,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        use_weighting=False,
    )
    inputs = {
        "input_ids": torch.zeros_like(mask_BT),
        "attention_mask": torch.ones_like(mask_BT),
        "completion_mask": mask_BT,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    return DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)  # type: ignore[arg-type]


def kto_of_trl(
    rows: Rows,
    logprobs_BT: Tensor,
    ratios: np.ndarray,
    *,
    beta: float,
    weights: tuple[float, float],
) -> Tensor:
    """The loss of TRL's KTOTrainer, whose mismatched sequences have these log-ratios."""
    from trl.trainer.kto_trainer import KTOTrainer

    mask_BT = _mask(rows)
    model = _Model(logprobs_BT * mask_BT)
    trainer = _trainer(
        model=model,
        calculate_KL=True,
        loss_type="kto",
        beta=beta,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        _compute_kl_logps=lambda model, batch: torch.tensor(ratios),
    )
    inputs = {
        "input_ids": torch.zeros_like(mask_BT),
        "attention_mask": torch.ones_like(mask_BT),
        "completion_mask": mask_BT,
        "label": torch.tensor(rows.advantage > 0),
        "ref_logps": _sums(rows, "reference"),
        "ref_KL_logps": torch.zeros(len(rows)).double(),
    }
    return KTOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)  # type: ignore[arg-type]


def _means(rows: Rows, logprobs_BT: Tensor) -> tuple[Tensor, Tensor]:
    mask_BT = _mask(rows)
    means_B = (logprobs_BT * mask_BT).sum(1) / mask_BT.sum(1)
    return means_B[0::2], means_B[1::2]


def simpo_of_trl(rows: Rows, logprobs_BT: Tensor, *, beta: float, gamma: float) -> Tensor:
    """The loss of TRL's CPOTrainer with `loss_type="simpo"`."""
    from trl.experimental.cpo import CPOTrainer

    trainer: Any = SimpleNamespace(
        accelerator=_accelerator(),
        alpha=0.0,
        loss_type="simpo",
        simpo_gamma=gamma,
        beta=beta,
        label_smoothing=0.0,
    )
    loss: Any = CPOTrainer.cpo_loss
    return loss(trainer, *_means(rows, logprobs_BT))[0].mean()


def odds_of_trl(rows: Rows, logprobs_BT: Tensor, *, beta: float) -> Tensor:
    """The odds ratio's part of the loss of TRL's ORPOTrainer, in float32 as there."""
    from trl.experimental.orpo import ORPOTrainer

    trainer: Any = SimpleNamespace(accelerator=_accelerator(), beta=beta)
    loss: Any = ORPOTrainer.odds_ratio_loss
    return -loss(trainer, *_means(rows, logprobs_BT))[0].mean()
