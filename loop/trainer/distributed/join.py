"""Join a distributed training, under `torchrun` or not."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from ....store.errors import ConfigError
from ...config import RunConfig
from .world import MultiProcess

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


joined_process: list[MultiProcess] = []
"""The world that torchrun started, in a list of at most one: it lives as long as the process."""


@dataclass(frozen=True)
class Terms:
    """The settings that every process needs to join."""

    size: int
    shard: int | None
    device: str
    seconds: float
    idle_seconds: float
    """Longest time between two calls of rank 0, which waits for rows."""
    tensor: int = 1
    """Number of processes that divide each matrix."""
    experts: int = 1
    """Number of processes that divide the experts of a layer."""
    context: int = 1
    """Number of processes that divide each sequence."""

    @classmethod
    def of(cls, config: RunConfig, *, size: int) -> "Terms":
        """Return the settings of a run; ConfigError if they contradict each other."""
        parallel = config.trainer.distributed
        try:
            parallel.check(size)
        except ValueError as error:
            raise ConfigError(f"`trainer.distributed`: {error}") from error
        if size > 1 and ":" in config.model.device:
            raise ConfigError(
                f"`model.device` is {config.model.device}, but each of {size} processes takes its "
                "own GPU; set it to cuda"
            )
        if size > 1 and config.trainer.optimizer == "adafactor":
            raise ConfigError(
                "`trainer.optimizer` is adafactor, which torch cannot compute on parameters that "
                f"{size} processes share; take another one, such as adamw, or one process"
            )
        device = config.model.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(
            size,
            parallel.shard_size,
            device,
            parallel.timeout,
            config.schedule.timeout,
            tensor=parallel.tensor_parallel,
            experts=parallel.expert_parallel,
            context=parallel.context_parallel,
        )


def under_torchrun() -> bool:
    """Return whether torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def missing_variables() -> str:
    """Return the variables of torchrun that are not set, followed by `is` or `are`."""
    names = [name for name in TORCHRUN if name not in os.environ]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def joined_torchrun(terms: Terms) -> MultiProcess:
    """Join the processes that torchrun started; ConfigError if a variable is missing."""
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
    """Join the processes that meet at a store."""
    backend = "gloo"
    if terms.device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"process {rank} has no GPU: this machine has {torch.cuda.device_count()}; lower "
                "`trainer.distributed.world_size`, or set `model.device` to cpu"
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
        store,
        shard=terms.shard,
        seconds=terms.seconds,
        idle_seconds=terms.idle_seconds,
        tensor=terms.tensor,
        experts=terms.experts,
        context=terms.context,
    )
