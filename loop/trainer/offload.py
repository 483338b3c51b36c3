"""Keep parts of the training in CPU memory: the optimizer's state and step, and activations."""

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from ...store.errors import ConfigError
from ..config import OffloadConfig

_log = logging.getLogger(__name__)


def check_offload(config: OffloadConfig, device: torch.device, *, processes: int) -> None:
    """Raise ConfigError for what cannot be offloaded; warn if the model is on the CPU anyway."""
    if config.parameters and processes == 1:
        raise ConfigError(
            "`trainer.offload.parameters` is true, and one process needs all of its parameters for "
            "each pass; set `trainer.distributed.world_size` above 1, or offload the optimizer and "
            "activations"
        )
    if config.optimizer and not config.parameters and processes > 1:
        raise ConfigError(
            f"`trainer.offload.optimizer` is true, and {processes} processes offload the optimizer "
            "together with the parameters; set `trainer.offload.parameters` too"
        )
    chosen = [name for name, value in config if value]
    if chosen and device.type == "cpu":
        names = " and ".join(f"`trainer.offload.{name}`" for name in chosen)
        _log.warning("the model is on the CPU, so no memory is saved by %s", names)


class HostCopies:
    """Copies of parameters in CPU memory, which optimizers update in place of the parameters."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise ConfigError for an optimizer that has a state before its first step."""
        self._pairs: list[tuple[Tensor, nn.Parameter]] = []
        for optimizer in optimizers:
            if optimizer.state:
                raise ConfigError(
                    f"`trainer.offload.optimizer` is true, and `{type(optimizer).__name__}` has a "
                    "state before its first step; take another optimizer, such as adamw"
                )
            for group in optimizer.param_groups:
                hosts = [nn.Parameter(p.detach().to("cpu", copy=True)) for p in group["params"]]
                self._pairs += zip(group["params"], hosts, strict=True)
                group["params"] = hosts

    @torch.no_grad()
    def read(self) -> None:
        """Copy the parameters' values to the CPU."""
        for parameter, host in self._pairs:
            host.copy_(parameter)

    def take_gradients(self) -> None:
        """Move the parameters' gradients to the CPU."""
        for parameter, host in self._pairs:
            host.grad = None if parameter.grad is None else parameter.grad.to("cpu")
            parameter.grad = None

    @torch.no_grad()
    def write(self) -> None:
        """Copy the values of parameters that had a gradient back, and free the gradients."""
        for parameter, host in self._pairs:
            if host.grad is not None:
                parameter.copy_(host)
                host.grad = None


def activations_on_cpu(config: OffloadConfig) -> AbstractContextManager[object]:
    """Return the context of forward passes whose activations are kept in CPU memory, if chosen.

    torch's `save_on_cpu` would copy the parameters too, which stay on the device anyway.
    """
    return saved_tensors_hooks(_packed, _unpacked) if config.activations else nullcontext()


def _packed(tensor: Tensor) -> tuple[torch.device, Tensor]:
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return tensor.device, tensor.detach()
    # detached: what a hook returns must not refer to the tensor that it was given
    return tensor.device, tensor.detach().to("cpu")


def _unpacked(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = packed
    return tensor.to(device)
