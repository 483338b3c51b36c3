"""What a process must know to join a distributed training, under `torchrun` or not."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from ....store.errors import ConfigError
from ...config import RunConfig, check_shard
from .world import MultiProcess

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


joined_process: list[MultiProcess] = []
"""What this process is one of, when torchrun started it: for as long as it lives."""


@dataclass(frozen=True)
class Terms:
    """What every process must know to be one of several."""

    size: int
    shard: int | None
    device: str
    seconds: float
    idle_seconds: float
    """How long the first process may take between two calls, since it waits for rows."""

    @classmethod
    def of(cls, config: RunConfig, *, size: int) -> "Terms":
        """Return those of a run; raises ConfigError for what cannot be."""
        parallel = config.trainer.distributed
        try:
            check_shard(parallel.shard_size, size)
        except ValueError as error:
            raise ConfigError(f"`trainer.distributed`: {error}") from error
        if ":" in config.model.device:
            raise ConfigError(
                f"`model.device` is {config.model.device}, and {size} processes take a GPU each; "
                "set it to cuda"
            )
        device = config.model.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        wait = config.schedule.timeout
        return cls(size, parallel.shard_size, device, parallel.timeout, wait)


def under_torchrun() -> bool:
    """Tell whether torchrun started this process, as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def missing_variables() -> str:
    """Name the variables of torchrun that are not set, with their verb."""
    names = [name for name in TORCHRUN if name not in os.environ]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def joined_torchrun(terms: Terms) -> MultiProcess:
    """Join those that torchrun started; raises ConfigError when it did not say how."""
    absent = [name for name in TORCHRUN if name not in os.environ]
    if absent:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set as torchrun sets them, and {missing_variables()} not; "
            "start with torchrun, or unset them"
        )
    seconds = timedelta(seconds=terms.seconds)
    store, rank, _ = next(rendezvous("env://", timeout=seconds))
    joined_process.append(joined(terms, store, rank=rank, local_rank=int(os.environ["LOCAL_RANK"])))
    return joined_process[0]


def joined(terms: Terms, store: Store, *, rank: int, local_rank: int) -> MultiProcess:
    """Become one of several processes that meet at a store."""
    backend = "gloo"
    if terms.device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"process {rank} has no GPU of its own: there are {torch.cuda.device_count()} "
                "here; lower `trainer.distributed.world_size`, or set `model.device` to cpu"
            )
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=terms.size,
        timeout=timedelta(seconds=terms.seconds),
    )
    return MultiProcess(
        store, shard=terms.shard, seconds=terms.seconds, idle_seconds=terms.idle_seconds
    )
