"""Updates of a policy at a server of Tinker's API, by the gradient of our loss by its log-probs.

A step makes the two requests of the client's `forward_backward_custom`: `forward` for log-probs,
from which torch computes our loss and its gradient by them, and `forward_backward` to take that
gradient to the weights. The second goes with `optim_step`, once an update is known to be made. Its
loss is `importance_sampling` with the log-probs just computed, so that the ratio is 1 and the
gradient by a log-prob is minus the advantage. `forward_backward_custom` sends minus the gradient as
weights of `cross_entropy`, which is the same only where a server adds losses up: SkyRL's JAX
backend divides by the sum of the weights, which here may be 0 or negative.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...store.errors import JobError
from ..config import TrainerConfig
from .optimizers import scheduled
from .tinker_backend import TinkerPolicy, datum

if TYPE_CHECKING:
    from tinker import Datum


class TinkerUpdates:
    """Updates the adapter by the gradients that wait in the scorer, with the server's AdamW."""

    def __init__(self, policy: TinkerPolicy, config: TrainerConfig, *, total_steps: int) -> None:
        self._policy, self._config = policy, config
        # torch's schedules need an optimizer, which holds nothing but the learning rate.
        self._rate = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
        self._schedule = scheduled(self._rate, config, total_steps=total_steps)
        self._num_saved = 0
        self._norm: float | None = None

    def zero_grad(self) -> None:
        """Discard the gradients; nothing of them is at the server yet."""
        self._policy.scorer.pending.clear()

    def clip(self) -> dict[str, float]:
        """Return the norm of the gradient by the log-probs."""
        grads = [leaf.grad for _, leaf in self._policy.scorer.pending if leaf.grad is not None]
        squares = sum(float(grad.double().square().sum()) for grad in grads)
        return {"logprob_grad_norm": squares**0.5}

    def step(self) -> None:
        """Send the gradients, and update the weights."""
        from tinker import AdamParams

        config, policy, client = self._config, self._policy, self._policy.client
        params = AdamParams(
            learning_rate=self.learning_rate,
            beta1=config.betas[0],
            beta2=config.betas[1],
            eps=float(config.optimizer_kwargs.get("eps", 1e-8)),
            weight_decay=config.weight_decay,
            grad_clip_norm=config.max_grad_norm,
        )
        data = self._data()
        # Both are sent before either is waited for: the server then does them at one go.
        sent = policy.training.forward_backward(data, "importance_sampling") if data else None
        stepped = policy.training.optim_step(params)
        if sent is not None:
            client.wait(sent, "compute the gradient")
        found = client.wait(stepped, "update the weights").metrics or {}
        self._norm = next((v for k, v in found.items() if k.endswith("grad_norm")), None)
        self._rate.step()  # has no gradient: the schedule only wants it called
        self.zero_grad()

    def advance(self) -> None:
        """Set the learning rate of the next training step."""
        self._schedule.step()

    @property
    def learning_rate(self) -> float:
        """The learning rate of this training step."""
        return float(self._schedule.get_last_lr()[0])

    def rates(self) -> dict[str, float]:
        """Return the learning rate, and the norm of the gradient if the server reports it."""
        norm = {} if self._norm is None else {"grad_norm": self._norm}
        return {"learning_rate": self.learning_rate, **norm}

    def state_dict(self) -> dict[str, Any]:
        """Keep adapter and optimizer at the server, and return where, with the schedule."""
        self._num_saved += 1
        name = f"state-{self._num_saved:06d}"
        saving = self._policy.training.save_state(name)
        saved = self._policy.client.wait(saving, f"keep the state `{name}`")
        return {"tinker": saved.path, "schedule": self._schedule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises JobError if it is of another backend, or the server no longer has it.
        """
        path = state.get("tinker")
        if path is None:
            raise JobError(
                "the checkpoint is of `trainer.backend: torch`, and this run has tinker; resume it "
                "with the backend it was started with, or name a new run with `--set name=...`"
            )
        client = self._policy.client
        try:
            client.wait(self._policy.training.load_state_with_optimizer(path), "load the state")
        except JobError as error:
            raise JobError(
                f"the state `{path}` of the checkpoint cannot be loaded: {error.__cause__}; the "
                f"server `{client.name}` must have what it had before: start it with the same "
                "storage and database, or remove the newest checkpoint to resume from the one "
                "before"
            ) from error
        self._schedule.load_state_dict(state["schedule"])

    def like(self, path: str) -> dict[str, Tensor]:
        """Return nothing: no tensor of the state is here."""
        del path
        return {}

    def _data(self) -> "list[Datum]":
        """Return the rows with the gradient of our loss by each token's log-prob."""
        rows = [
            (row, leaf.detach()[place], leaf.grad[place])
            for by_place, leaf in self._policy.scorer.pending
            for place, row in by_place.items()
            if leaf.grad is not None
        ]
        is_mean = self._policy.settings.loss_reduction == "mean"
        data: list[Datum] = []
        for row, logprobs_T, grad_T in rows:
            # a mean of means divides by both, over all targets, trained or not
            scale = (len(row) - 1) * len(rows) if is_mean else 1
            own = slice(1, len(row))
            data.append(datum(row, logprobs=logprobs_T[own], advantages=-scale * grad_T[own]))
        return data
