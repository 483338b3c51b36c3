"""Optimizers and learning-rate schedules of the networks that are trained."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ...operators.import_path import import_from
from ...store.errors import ConfigError
from ..config import LrSchedulerConfig, TrainerConfig
from .distributed.fsdp import whole
from .offload import HostCopies


class Optimizers:
    """The optimizers of each network, with learning-rate schedules over training steps."""

    def __init__(
        self, networks: Mapping[str, nn.Module], config: TrainerConfig, *, total_steps: int
    ) -> None:
        """Raise ConfigError for options that an optimizer or a schedule does not accept."""
        self._config = config
        self._networks = dict(networks)
        # Kept, since after a pass without gradient FSDP has whole ones in their place.
        self._parameters = [p for network in networks.values() for p in network.parameters()]
        self._optimizers = {
            name: optimizer
            for network_name, network in networks.items()
            for name, optimizer in made(
                network_name, network, config, rate=_learning_rate(network_name, config)
            )
        }
        self._copies = HostCopies(self._optimizers.values()) if config.offload.optimizer else None
        self._schedules = {
            name: scheduled(optimizer, config, total_steps=total_steps)
            for name, optimizer in self._optimizers.items()
        }

    def zero_grad(self) -> None:
        """Discard the gradients."""
        # None and not 0: optimizers skip None, but apply decay and momentum to a gradient of 0.
        for parameter in self._parameters:
            parameter.grad = None

    def clip(self) -> dict[str, float]:
        """Clip each network's gradient to `max_grad_norm`; return the norms before."""
        return {
            # Each network alone, or a critic's large gradient would shrink the policy's update.
            _metric("grad_norm", name): clip_gradients(network, self._config.max_grad_norm)
            for name, network in self._networks.items()
        }

    def step(self) -> None:
        """Update the weights."""
        if self._copies is not None:
            self._copies.take_gradients()
        for optimizer in self._optimizers.values():
            optimizer.step()
        if self._copies is not None:
            self._copies.write()

    def advance(self) -> None:
        """Set the learning rates of the next training step."""
        for schedule in self._schedules.values():
            schedule.step()

    def rates(self) -> dict[str, float]:
        """Return the current learning rates."""
        return {
            _metric("learning_rate", name): float(self._schedules[name].get_last_lr()[0])
            for name in self._networks
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizers and schedules."""
        return {
            name: {
                "optimizer": self._optimizers[name].state_dict(),
                "schedule": self._schedules[name].state_dict(),
            }
            for name in self._optimizers
        }

    def like(self, path: str) -> dict[str, Tensor]:
        """Return the parameter that each part of the state belongs to, by the part's path."""
        return {
            f"{path}/{name}/optimizer/state/{i}": parameter
            for name, optimizer in self._optimizers.items()
            for i, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state[name]["optimizer"])
            self._schedules[name].load_state_dict(state[name]["schedule"])
        if self._copies is not None:  # the networks were restored before
            self._copies.read()


def clip_gradients(network: nn.Module, most: float) -> float:
    """Clip the gradients of a network to a norm, and return their norm before.

    torch adds up the norms of one mesh only, and experts may have a mesh of their own.
    """
    meshes = by_mesh(p for p in network.parameters() if p.grad is not None)
    if len(meshes) <= 1:
        return float(whole(nn.utils.clip_grad_norm_(network.parameters(), most)))
    norms = [
        whole(nn.utils.get_total_norm([p.grad for p in some if p.grad is not None]))
        for some in meshes
    ]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for some in meshes:
        nn.utils.clip_grads_with_norm_(some, most, total)
    return float(total)


def by_mesh(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the parameters of each device mesh; plain ones have none."""
    found: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        found.setdefault(mesh, []).append(parameter)
    return list(found.values())


def made(
    name: str, network: nn.Module, config: TrainerConfig, *, rate: float
) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers of a network, each with a name.

    Muon (https://kellerjordan.github.io/posts/muon) updates the matrices between embeddings and
    head, with steps as large as AdamW's (arXiv:2502.16982); AdamW updates the rest.
    """
    trained = [p for p in network.parameters() if p.requires_grad]
    if config.optimizer != "muon":
        kind, options = _kind(config)
        if options.get("fused") and len(by_mesh(trained)) > 1:
            options["fused"] = False  # one kernel takes the parameters of one mesh
        yield name, _built(kind, _groups(trained, config), options | {"lr": rate}, config)
        return
    outer = set(_outer(network))
    inner = [p for p in trained if p.ndim == 2 and p not in outer]
    rest = [p for p in trained if p.ndim != 2 or p in outer]
    options = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": config.weight_decay}
    options |= {"lr": rate, **config.optimizer_kwargs}
    if inner:
        yield name, _built(torch.optim.Muon, [{"params": inner}], options, config)
    if rest:
        # One optimizer has the network's own name, by which `rates` finds the schedule.
        rest_name = f"{name}_rest" if inner else name
        # Without `optimizer_kwargs`, which are Muon's.
        yield rest_name, torch.optim.AdamW(_groups(rest, config), lr=rate, betas=config.betas)


def _kind(config: TrainerConfig) -> tuple[Any, dict[str, Any]]:
    """Return an optimizer's class and its options."""
    if config.optimizer == "adamw":
        own: dict[str, Any] = {"betas": config.betas, "fused": True}
        return torch.optim.AdamW, own | config.optimizer_kwargs
    if config.optimizer == "adamw_8bit":
        return _adamw_8bit(), {"betas": config.betas} | config.optimizer_kwargs
    ours = {"sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor}
    if config.optimizer in ours:
        return ours[config.optimizer], dict(config.optimizer_kwargs)
    found = import_from(config.optimizer, "optimizer", form="Class")
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(
            f"the optimizer `{config.optimizer}` must be a class of torch.optim.Optimizer"
        )
    return found, dict(config.optimizer_kwargs)


def _adamw_8bit() -> Any:
    try:
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "the optimizer `adamw_8bit` is of the package torchao, which is not installed; "
            "`pip install torchao`, or take adafactor, whose state is small too"
        ) from error
    return AdamW8bit


def _built(
    kind: Any, groups: list[dict[str, Any]], options: Mapping[str, Any], config: TrainerConfig
) -> Optimizer:
    try:
        return kind(groups, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"`trainer.optimizer_kwargs` do not fit `{config.optimizer}`: {error}"
        ) from error


def _groups(parameters: Iterable[Tensor], config: TrainerConfig) -> list[dict[str, Any]]:
    """Return parameter groups, each with its weight decay."""
    given = list(parameters)
    if config.weight_decay_params == "all":
        return [{"params": given, "weight_decay": config.weight_decay}]
    groups = [
        {"params": [p for p in given if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in given if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _outer(network: nn.Module) -> Iterator[Tensor]:
    """Yield the weights of embeddings, LM heads, and heads with one output."""
    for module in network.modules():
        if isinstance(module, nn.Embedding):
            yield module.weight
        head = getattr(module, "get_output_embeddings", lambda: None)()
        if head is not None:
            yield head.weight
    yield from (p for p in network.parameters() if p.ndim == 2 and min(p.shape) == 1)


def _learning_rate(network: str, config: TrainerConfig) -> float:
    own = config.critic.learning_rate if network == "critic" else None
    return config.learning_rate if own is None else own


def _metric(what: str, network: str) -> str:
    return what if network == "policy" else f"{network}_{what}"


def scheduled(optimizer: Optimizer, config: TrainerConfig, *, total_steps: int) -> LRScheduler:
    """Return the learning-rate schedule of an optimizer: ours, or one of transformers by name."""
    schedule = config.lr_scheduler
    if schedule.name in ("constant", "linear", "cosine"):
        return LambdaLR(optimizer, lambda step: rate_share(step, schedule, total_steps=total_steps))
    from transformers import get_scheduler

    options = dict(schedule.kwargs)
    if schedule.name == "warmup_stable_decay":
        # transformers has no default for it, and without it the schedule cannot be made
        options.setdefault("num_decay_steps", max(1, total_steps // 5))
    try:
        return get_scheduler(schedule.name, optimizer, schedule.warmup_steps, total_steps, options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"`trainer.lr_scheduler.kwargs` do not fit `{schedule.name}`: {error}"
        ) from error


def rate_share(step: int, schedule: LrSchedulerConfig, *, total_steps: int) -> float:
    """Return the share of the learning rate at a step, counted from 0: warm-up, then decay.

    >>> from types import SimpleNamespace
    >>> schedule = SimpleNamespace(warmup_steps=2, name="linear", min_lr_ratio=0.5)
    >>> [rate_share(step, schedule, total_steps=6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.875, 0.75, 0.625]
    """
    # `step + 1`: at a rate of 0 the first step would change nothing.
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    done = min(1.0, (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps))
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * shape[schedule.name]
