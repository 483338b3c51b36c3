"""How many threads torch computes with on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..config import FrozenModel, RunConfig

TINY = 2**22
"""Bytes of a model's weights below which one thread computes no slower than several."""


def use_threads(config: RunConfig) -> None:
    """Set the number of torch's threads, for operations of the calling thread.

    Without `threads`, a run of an explorer and a trainer gives a tiny model one. Both have threads
    of their own, together more than there are CPUs, and OpenMP lets these sleep between operations
    instead of spinning: waking one takes longer than it saves. The number depends on the
    configuration alone, so that a resumed run rounds as before.
    """
    number = config.threads
    if number is None and config.explorer is not None and 0 < weight_bytes(config.model) < TINY:
        number = 1
    if number is not None:
        torch.set_num_threads(number)


@contextmanager
def threads_restored() -> Iterator[None]:
    """Give the calling thread its number of threads back at the end."""
    number = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(number)


def weight_bytes(model: FrozenModel) -> int:
    """Return the size of a model's weights, about; 0 for adapters and what is not found here."""
    tiny = model.from_scratch
    if tiny is not None:
        return 48 * tiny.layers * tiny.hidden_size**2
    files = Path(model.path).glob("model*.safetensors") if model.path else ()
    return sum(file.stat().st_size for file in files)
