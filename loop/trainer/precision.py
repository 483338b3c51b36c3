"""What networks work out in fewer bits, and what is said when memory does not suffice."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...store.errors import JobError
from ..config import TrainerConfig


def autocast(config: TrainerConfig, device: torch.device) -> torch.autocast:
    """Return the context in which networks are asked; weights stay as they are.

    Raises JobError when the device has no bfloat16.
    """
    able = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if config.precision == "bfloat16" and not able:
        raise JobError(
            f"`trainer.precision` is bfloat16, and `{torch.cuda.get_device_name(device)}` does not "
            "know it; set it to auto or float32"
        )
    wanted = config.precision == "bfloat16" or (
        config.precision == "auto" and device.type == "cuda" and able
    )
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=wanted)


@contextmanager
def within_memory(config: TrainerConfig) -> Iterator[None]:
    """Turn what torch raises when memory does not suffice into a JobError that says what to lower.

    Nothing is tried again: how a step is cut would then depend on what else runs on the machine.
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
    return "can't allocate memory" in str(error)  # what the allocator of CPUs says
