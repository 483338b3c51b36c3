"""Rows on which a step's loss or gradient is not finite: named, kept, and not trained on."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..algorithms import Algorithm
from ..losses.batch import Batch, Examples


@dataclass(frozen=True)
class NonFiniteRow:
    """Why a row's update was not made."""

    experience_id: str
    error: str


def of_batch(
    rows: Examples, batch: Batch, logprobs_BT: Tensor, algorithm: Algorithm
) -> list[NonFiniteRow]:
    """Name the rows of a micro-batch that have no finite loss of their own, and say why."""
    found = []
    units = rows.units[list(batch.places)]
    for unit in units.unique():
        at = (units == unit).nonzero()[:, 0]
        part, own_BT = batch.take(at), logprobs_BT.detach()[at]
        loss = float(algorithm.loss(part, own_BT).value)
        if not math.isfinite(loss):
            message = _why(part, own_BT) or f"its loss is {loss}"
            found += [NonFiniteRow(rows.experience_ids[batch.places[int(b)]], message) for b in at]
    return found


def _why(batch: Batch, logprobs_BT: Tensor) -> str | None:
    for name, values_BT in {"log-probs": logprobs_BT, **batch.tokens}.items():
        if not torch.isfinite(values_BT * batch.mask_BT).all():
            return f"its {name} are not all finite"
    return None


def of_update(rows: Examples, norm: float) -> list[NonFiniteRow]:
    """Name all rows of an update whose gradient is not finite."""
    message = f"it was in an update whose gradient has norm {norm}"
    return [NonFiniteRow(name, message) for name in rows.experience_ids]
