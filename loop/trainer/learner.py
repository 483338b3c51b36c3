"""Networks, optimizers and checkpoints on every rank; rank 0's calls are made on all of them."""

import random
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ..algorithms import Algorithm, resolve
from ..config import RunConfig
from ..losses.batch import Examples
from ..models.load import pad_id, put
from ..models.remote_weights import RemoteModel
from ..models.threads import use_threads
from .checkpoints import Checkpoints
from .distributed.fsdp import gathered, shard
from .distributed.world import MultiProcess, SingleProcess
from .networks import Networks, build
from .step import StepResult, Updater

P = ParamSpec("P")
R = TypeVar("R")


def on_all_ranks(
    method: "Callable[Concatenate[Learner, P], R]",
) -> "Callable[Concatenate[Learner, P], R]":
    """Broadcast each call on rank 0 to the other ranks."""

    @wraps(method)
    def call(self: "Learner", *args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "calls are broadcast with positional arguments only"
        with self.world.attribute_failure():
            self.world.broadcast_call(method.__name__, args)
            return method(self, *args, **kwargs)

    return call


class Learner:
    """Networks, their optimization and their checkpoints, sharded if there are several ranks."""

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        networks: Networks,
        *,
        total_steps: int,
        pad_id: int,
        folder: Path,
        world: SingleProcess,
    ) -> None:
        self.world, self._networks = world, networks
        self._whole: PreTrainedModel | None = None
        if isinstance(world, MultiProcess):
            # Copied before sharding, which leaves each process a part of every parameter; weights
            # are published from this copy.
            if world.rank == 0:
                self._whole = put(deepcopy(networks.policy), "cpu")
            on_cpu = config.trainer.offload.parameters
            shard(networks, world, needs=algorithm.needs, on_cpu=on_cpu)
        self._optimization = Updater(
            networks,
            algorithm,
            config.trainer,
            total_steps=total_steps,
            pad_id=pad_id,
            seed=config.seed,
            world=world,
        )
        # Each share of the rows draws its own dropout masks.
        torch.manual_seed(config.seed + world.data_rank)
        self.checkpoints = Checkpoints(folder, keep=config.trainer.keep_checkpoints, world=world)

    @on_all_ranks
    def step(self, rows: Examples) -> StepResult:
        """Take a training step on the rows of a draw."""
        return self._optimization.step(rows)

    @on_all_ranks
    def evaluate(self, parts: Sequence[Examples]) -> dict[str, float]:
        """Return the loss and metrics of rows, without an update."""
        return self._optimization.evaluate(parts)

    @on_all_ranks
    def policy(self) -> PreTrainedModel | RemoteModel:
        """Return the current policy; with several processes, an unsharded copy on rank 0."""
        if self._networks.served is not None:
            return self._networks.served
        if not isinstance(self.world, MultiProcess):
            return self._networks.policy
        weights = gathered(self._networks.policy)  # a collective call: all ranks take part
        # Ranks other than 0 take part in the collective call only; nothing is published there.
        if self._whole is None:
            return self._networks.policy
        self._whole.load_state_dict(weights)
        return self._whole

    @on_all_ranks
    def save(self, step: int, facts: Mapping[str, Any]) -> None:
        """Start to write a checkpoint of all that a resumed run needs."""
        state = {**self._optimization.state(), "random": self.world.gather(_random_state())}
        self.checkpoints.write(step, state=state, facts=facts)

    @on_all_ranks
    def load(self, step: int) -> dict[str, Any]:
        """Load the checkpoint of a step, of any number of processes; return its facts."""
        state, facts = self.checkpoints.read(step, like=self._optimization.like)
        self._optimization.load(state)
        # A run resumed with more shares has some without a state; they keep their own seed.
        if self.world.data_rank < len(state["random"]):
            _go_on_from(state["random"][self.world.data_rank])
        return facts

    @on_all_ranks
    def settled(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        self.checkpoints.wait()


def learner(
    config: RunConfig,
    networks: Networks,
    tokenizer: PreTrainedTokenizerFast,
    *,
    total_steps: int,
    folder: Path,
    world: SingleProcess,
) -> Learner:
    """Return the learner of rank 0, and create those of the other ranks."""
    world.broadcast_call("begin", (config, total_steps, folder))
    return Learner(
        config,
        resolve(config.algorithm),
        networks,
        total_steps=total_steps,
        pad_id=pad_id(tokenizer),
        folder=folder,
        world=world,
    )


def begin(world: SingleProcess, config: RunConfig, total_steps: int, folder: Path) -> Learner:
    """Return the learner of another rank."""
    use_threads(config)
    networks, tokenizer = build(config, resolve(config.algorithm))
    # Its broadcast does nothing here: only rank 0 sends.
    return learner(config, networks, tokenizer, total_steps=total_steps, folder=folder, world=world)


def _random_state() -> dict[str, Any]:
    """Return the state of all generators, as tensors and plain values."""
    # `torch.load` with `weights_only` refuses numpy arrays, so the keys become a tensor.
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "python": random.getstate(),
    }


def _go_on_from(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
