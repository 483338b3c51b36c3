"""Numerical limits of a step: reduced precision, non-finite losses, exhausted memory."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...store.errors import JobError
from ..algorithms import Algorithm
from ..config import TrainerConfig
from ..losses.batch import Batch, Examples


@dataclass(frozen=True)
class NonFiniteRow:
    """A row whose update was skipped, and why."""

    experience_id: str
    error: str


def of_batch(
    rows: Examples, batch: Batch, logprobs_BT: Tensor, algorithm: Algorithm
) -> list[NonFiniteRow]:
    """Return the rows of a micro-batch whose own loss is not finite, with the reason."""
    found = []
    units = rows.units[list(batch.places)]  # the loss of a pair needs both of its rows
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
    """Return all rows of an update whose gradient is not finite: any of them may be the cause."""
    message = f"it was in an update whose gradient has norm {norm}"
    return [NonFiniteRow(name, message) for name in rows.experience_ids]


def autocast(config: TrainerConfig, device: torch.device, *, dtype: str) -> torch.autocast:
    """Return the context of forward passes; weights keep their precision.

    `dtype` is the type of the weights in engines, which `precision: auto` follows. Raises JobError
    if the device does not support bfloat16.
    """
    able = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if config.precision == "bfloat16" and not able:
        raise JobError(
            f"`trainer.precision` is bfloat16, which `{torch.cuda.get_device_name(device)}` does "
            "not support; set it to auto or float32"
        )
    wanted = config.precision == "bfloat16" or (
        config.precision == "auto" and able and (device.type == "cuda" or dtype == "bfloat16")
    )
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=wanted)


@contextmanager
def within_memory(config: TrainerConfig) -> Iterator[None]:
    """Turn torch's errors for exhausted memory into a JobError that says what to lower.

    The step is not retried in smaller parts: its micro-batches would then depend on what else runs
    on the machine.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_memory(error):
            raise
        ways = [
            f"lower `trainer.micro_batch_tokens` (now {config.micro_batch_tokens})",
            f"`trainer.max_logits_bytes` (now {config.max_logits_bytes})",
        ]
        if not config.gradient_checkpointing:
            ways.append("or set `trainer.gradient_checkpointing`")
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no memory is left"
        raise JobError(f"a training step ran out of memory: {reason}; {', '.join(ways)}") from error


def _is_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "can't allocate memory" in str(error)  # torch's CPU allocator raises RuntimeError
