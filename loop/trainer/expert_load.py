"""How a step's tokens are divided among the experts of a mixture, and the loss that evens it."""

import torch
import torch.distributed as dist
from torch import Tensor

from ..losses.batch import Examples
from ..models.routers import Balance, Routing
from ..models.token_logprobs import Scorer
from .distributed.world import SingleProcess


class ExpertLoad:
    """Counts the tokens of experts over all processes, and sets the load-balancing loss."""

    def __init__(
        self, scorer: Scorer, routing: Routing, *, coef: float, world: SingleProcess
    ) -> None:
        self._scorer, self._routing, self._coef, self._world = scorer, routing, coef, world
        self._share_LE: Tensor | None = None

    @property
    def is_balanced(self) -> bool:
        """Whether there is a load-balancing loss, whose shares are measured before the update."""
        return self._coef > 0

    def begin(self) -> None:
        """Count from 0."""
        self._routing.reset(self._scorer.model.device)

    def measure(self) -> None:
        """Take the shares of the experts from what was counted."""
        load_LE = self._sums()["load"]
        self._share_LE = self._routing.top_k * load_LE / load_LE.sum(1, keepdim=True).clamp(min=1)

    def begin_update(self, rows: Examples) -> None:
        """Count from 0, and add the loss to the gradients of an update."""
        self.begin()
        if self._share_LE is None:
            return
        tokens = max(1, rows.num_read_tokens)
        weight_LE = self._share_LE * (self._routing.num_experts / self._routing.num_layers / tokens)
        scale = self._coef * self._world.averaged
        self._routing.balance = Balance(weight_LE.to(self._scorer.model.device), scale)

    def end_update(self) -> dict[str, float]:
        """Return the metrics of an update, and end the loss.

        `router_load_max` is the share of the tokens that the busiest expert of a layer got, in
        units of an even share; `router_mismatch` the share of replayed experts that the trainer's
        routers would not have chosen; `router_aux_loss` the loss before its coefficient.
        """
        found = self._sums()
        load_LE, total = found["load"], found["load"].sum().clamp(min=1)
        busiest = load_LE.amax() * (self._routing.num_experts * self._routing.num_layers) / total
        made = {"router_load_max": float(busiest)}
        if self._routing.is_replay:
            made["router_mismatch"] = float(found["differing"] / total)
        if self.is_balanced:
            made["router_aux_loss"] = float(found["loss"])
        self._routing.balance = None
        return made

    def _sums(self) -> dict[str, Tensor]:
        """Return the sums over all processes; a collective call."""
        context = self._scorer.context
        for name in sorted(self._routing.sums) if context is not None else ():
            assert context is not None, "there are several processes"
            dist.all_reduce(self._routing.sums[name], group=context.group)
        sums = {name: value.cpu() for name, value in self._routing.sums.items()}
        return {n: v.to(torch.float64) for n, v in self._world.merge(sums).items()}
