"""What a step needs to update weights, wherever they are: in this process or at a server."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class WeightUpdates(Protocol):
    """Updates weights by the gradients of a loss.

    `Optimizers` does so in this process, and `TinkerUpdates` at a server. With a scorer, which
    gives log-probs from which the gradients come, it is all that a step knows of where weights are.
    """

    def zero_grad(self) -> None:
        """Discard the gradients."""
        ...

    def clip(self) -> dict[str, float]:
        """Return norms of the gradient, which are finite if the update may be made."""
        ...

    def step(self) -> None:
        """Update the weights."""
        ...

    def advance(self) -> None:
        """Set the learning rates of the next training step."""
        ...

    def rates(self) -> dict[str, float]:
        """Return the metrics of the last update, learning rates among them."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        ...

    def like(self, path: str) -> dict[str, Tensor]:
        """Return the parameters that parts of the state are sharded like, by the parts' paths."""
        ...
