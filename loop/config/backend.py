"""The section `trainer.backend`: where the policy's weights are while it is trained."""

from typing import ClassVar, Literal

from pydantic import Field

from .base import Choice, Float, Int, Section


class TorchBackend(Section):
    """torch, in the trainer's process or processes."""


class TinkerBackend(Section):
    """A server of Tinker's API, which trains a low-rank adapter: Thinking Machines', or SkyRL.

    rlake draws rows and computes advantages, losses and their gradient by the log-probs; the server
    computes log-probs, the gradient by the weights, AdamW's update, and samples. `model.path` gives
    tokenizer and configuration; its weights are not loaded. The key is read from TINKER_API_KEY.
    """

    base_url: str | None = None
    """Address of the server; None: the variable TINKER_BASE_URL, or Thinking Machines' service."""
    base_model: str | None = None
    """The server's name of the model that is trained; None: `model.path`."""
    rank: Int = Field(default=32, ge=1)
    """Rank of the adapter. The server sets its alpha (32), and trains all linear layers."""
    loss_reduction: Literal["sum", "mean"] = "sum"
    """How the server reduces the losses of tokens, which rlake undoes.

    sum: over all tokens, as Tinker's API defines it. mean: over the tokens of each sequence, then
    over sequences, as SkyRL's JAX backend does. With the wrong one, sequences of different lengths
    have wrong weights.
    """
    request_timeout: Float = Field(default=600.0, gt=0)
    """Longest wait for one answer of the server, in seconds; a first one may compile."""


class BackendConfig(Choice):
    """The training backend: exactly one key is set, with its parameters."""

    noun: ClassVar[str] = "backend"

    torch: TorchBackend | None = None
    tinker: TinkerBackend | None = None
