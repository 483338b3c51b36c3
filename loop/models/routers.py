"""The routers of a mixture of experts: what they choose is recorded, replayed and balanced.

Each router of transformers chooses by one `torch.topk` over its experts. Routers of a prepared
model take the indices of `Routing` in its place, so that the weights of the replayed experts are
computed by the router's own rule, with its gradients (R3, arXiv:2510.11370).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ...store.errors import ConfigError
from .lm_head import evaluating

OWN = -1
"""The index of an expert that the router chooses itself."""


@dataclass(frozen=True)
class Balance:
    """The load-balancing loss of an update, whose gradient routers add to that of the loss.

    It is E x sum_i f_i p_i for E experts (arXiv:2101.03961), averaged over the layers; p_i is the
    mean probability of an expert. The share f_i of tokens that go to it has no gradient, and is of
    all tokens of the step (arXiv:2501.11873), so that the loss is a sum over micro-batches.
    """

    weight_LE: Tensor
    """E x f, divided by the layers and by the tokens of the update."""
    scale: float
    """What the loss is multiplied with before its gradient is taken."""


class Routing:
    """What the L routers of a model choose for P positions, K of E experts each."""

    def __init__(self, num_layers: int, top_k: int, num_experts: int) -> None:
        self.num_layers, self.top_k, self.num_experts = num_layers, top_k, num_experts
        self.chosen: dict[int, Tensor] | None = None
        """The choices [P, K] by layer; None: they are not recorded."""
        self.balance: Balance | None = None
        """The load-balancing loss; None: there is none."""
        self.is_replay = False
        """Whether the choices of the engine are replayed."""
        self.sums: dict[str, Tensor] = {}
        """Sums over counted positions since the last `reset`: `load` [L, E], the tokens that each
        expert got, `differing`, the replayed experts that the router would not have chosen, and
        `loss`, the load-balancing loss."""
        self._replayed_PLK: Tensor | None = None
        self._counted_P: Tensor | None = None
        self._is_counting = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of layers, of experts for a token, and of experts."""
        return self.num_layers, self.top_k, self.num_experts

    def reset(self, device: torch.device) -> None:
        """Set all sums to 0."""
        zero = torch.zeros((), device=device)
        load_LE = zero.new_zeros(self.num_layers, self.num_experts)
        self.sums = {"load": load_LE, "differing": zero.clone(), "loss": zero.clone()}

    def begin(self, replayed_PX: Tensor | None, counted_P: Tensor | None) -> None:
        """Set what the next pass replays (X = L x K; `OWN`: no choice), and which positions count.

        Both hold until the next call, since the backward pass may compute layers again; what it
        computes is not counted, which ends with `end`.
        """
        self._replayed_PLK = (
            None if replayed_PX is None else replayed_PX.unflatten(1, (-1, self.top_k))
        )
        self._counted_P, self._is_counting = counted_P, counted_P is not None and bool(self.sums)
        if self.chosen is not None:
            self.chosen.clear()

    def end(self) -> None:
        """Count nothing more of this pass."""
        self._is_counting = False

    def choose(self, layer: int, own_PK: Tensor) -> Tensor:
        """Return the experts of a layer in place of the router's own choice."""
        index_PK = own_PK
        if self._replayed_PLK is not None:
            replayed_PK = self._replayed_PLK[:, layer].to(own_PK)
            index_PK = torch.where(replayed_PK == OWN, own_PK, replayed_PK)
        if self.chosen is not None:
            self.chosen[layer] = index_PK
        if self._is_counting:
            self._count(layer, index_PK, own_PK)
        return index_PK

    def _count(self, layer: int, index_PK: Tensor, own_PK: Tensor) -> None:
        counted_P1 = self._counted()[:, None]
        self.sums["load"][layer].index_add_(
            0, index_PK.flatten(), counted_P1.expand_as(index_PK).flatten()
        )
        is_own_PK = (index_PK[:, :, None] == own_PK[:, None, :]).any(-1)
        self.sums["differing"] += (~is_own_PK * counted_P1).sum()

    def balanced(self, layer: int, logits_PE: Tensor, weights_PK: Tensor) -> Tensor:
        """Return the weights of the chosen experts, whose gradient brings that of the balance."""
        if self.balance is None or not torch.is_grad_enabled():
            return weights_PK
        counted_P = self._counted()
        p_E = (logits_PE.float().softmax(-1) * counted_P[:, None]).sum(0)
        loss = (p_E * self.balance.weight_LE[layer]).sum()
        if self._is_counting:
            self.sums["loss"] += loss.detach()
        # Not added to the loss: FSDP has the weights of a layer while its own backward pass runs.
        made: Any = _WithLoss.apply(weights_PK, loss * self.balance.scale)
        return made

    def _counted(self) -> Tensor:
        assert self._counted_P is not None, "`begin` came before"
        return self._counted_P.float()

    def taken(self) -> Tensor:
        """Return the choices of the last pass: [P, X], layer by layer."""
        assert self.chosen is not None, "choices are recorded"
        return torch.cat([self.chosen[layer] for layer in range(self.num_layers)], 1)


class _WithLoss(torch.autograd.Function):
    """Returns values unchanged; the backward pass adds the gradient of a loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, torch.ones((), device=grad.device)


class _Router(nn.Module):
    """Is put before the class of a router, whose forward pass it wraps."""

    routing: Routing
    layer: int
    logits_at: int
    """Where the logits are among the outputs."""
    top_k: int
    num_experts: int

    @torch.compiler.disable  # torch.compile does not see through the replaced `topk`
    def forward(self, *args: Any, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with _Choice(self):
            found = list(super().forward(*args, **options))
        at = next(i for i, x in enumerate(found) if i != self.logits_at and x.is_floating_point())
        found[at] = self.routing.balanced(self.layer, found[self.logits_at], found[at])
        return tuple(found)


class _Choice(TorchFunctionMode):
    """Replaces the choice of a router."""

    def __init__(self, router: _Router) -> None:
        super().__init__()
        self._router = router

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        score_PE, router = args[0], self._router
        # others choose groups of experts
        is_choice = score_PE.shape[1:] == (router.num_experts,)
        if not is_choice or found.indices.shape[-1] != router.top_k:
            return found
        index_PK = router.routing.choose(router.layer, found.indices)
        return torch.return_types.topk((score_PE.gather(-1, index_PK), index_PK))


def prepared(model: PreTrainedModel) -> Routing:
    """Let the routers of a model follow a `Routing`, and return it.

    Raises ConfigError for a model without routers, or with routers of an unknown kind.
    """
    recorders = _recorders(model)
    found = _routers(model, recorders)
    if not found:
        raise ConfigError(
            f"`{type(model).__name__}` has no routers whose choices can be replayed or balanced; "
            "take a mixture of experts, or leave out `model.router_replay` and "
            "`trainer.router_aux_loss_coef`"
        )
    if isinstance(found[0], _Router):
        return found[0].routing
    routing = Routing(len(found), found[0].top_k, found[0].num_experts)
    for layer, router in enumerate(found):
        router.logits_at = next(at for kind, at in recorders.items() if isinstance(router, kind))
        router.routing, router.layer = routing, layer
        router.__class__ = type(type(router).__name__, (_Router, type(router)), {})
    _check(model, routing)
    return routing


def of(model: PreTrainedModel) -> tuple[int, int, int] | None:
    """Return a model's numbers of layers with experts, of experts for a token, and of experts."""
    found = _routers(model, _recorders(model))
    return (len(found), found[0].top_k, found[0].num_experts) if found else None


def _routers(model: PreTrainedModel, kinds: Iterable[type]) -> list[Any]:
    """Return the routers of a model in the order of its layers."""
    known = tuple(kinds)
    return [m for m in model.modules() if isinstance(m, known) and hasattr(m, "top_k")]


def _recorders(model: PreTrainedModel) -> dict[type, int]:
    """Return the classes whose output transformers records as `router_logits`, and its place."""
    made: dict[type, int] = {}
    for module in model.modules():
        given: Any = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for one in given if isinstance(given, list) else [given]:
            if isinstance(kind := getattr(one, "target_class", None), type):
                made[kind] = one.index
    return made


@torch.no_grad()
def _check(model: PreTrainedModel, routing: Routing) -> None:
    """Raise ConfigError if a pass does not make one choice in each layer."""
    routing.chosen = {}
    with evaluating(model):
        model(input_ids=torch.tensor([[1, 0]], device=model.device), use_cache=False)
    shapes = [tuple(index_PK.shape) for _, index_PK in sorted(routing.chosen.items())]
    routing.chosen = None
    if shapes != [(2, routing.top_k)] * routing.num_layers:
        raise ConfigError(
            f"the routers of `{type(model).__name__}` do not choose {routing.top_k} of "
            f"{routing.num_experts} experts by `torch.topk`; leave out `model.router_replay` and "
            "`trainer.router_aux_loss_coef`"
        )
