"""Compute log-probs of tokens from hidden states, in chunks: [M, V] is never whole in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from .attention import attention_of, is_flash
from .vocabulary_parallel import VocabularyPart, own_part

LOGITS_BYTES = 256 * 2**20
"""Default for the most bytes of logits in memory at once."""
Temperature = float | Tensor
"""One for all tokens, or one per token: [M]."""
KEPT = 2
"""Chunks of logits that are kept for the gradient; two more are in use."""


@dataclass(frozen=True)
class Head:
    """A model's head: a layer, a factor, and a soft cap on the logits."""

    layer: nn.Module
    factor: float = 1.0
    cap: float | None = None
    """Logits are cap * tanh(logits / cap)."""

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """Return the logits in float32: [M, V]."""
        return self.finished(self.layer(hidden_MD).float())

    def finished(self, logits_MV: Tensor) -> Tensor:
        """Apply the factor and the cap to the layer's output."""
        if self.factor != 1.0:
            logits_MV = logits_MV * self.factor
        return logits_MV if self.cap is None else self.cap * torch.tanh(logits_MV / self.cap)

    def logprobs(self, hidden_MD: Tensor, *, temperature: Temperature) -> Tensor:
        """Return the log-probs of the whole vocabulary in float32: [M, V]."""
        return logprobs_at(self.logits(hidden_MD), temperature)


def logprobs_at(logits_MV: Tensor, temperature: Temperature) -> Tensor:
    """Return the log-probs of the whole vocabulary at a temperature: [M, V]."""
    return torch.log_softmax(logits_MV / _column(temperature), dim=-1)


def _column(temperature: Temperature) -> Temperature:
    return temperature[:, None] if isinstance(temperature, Tensor) else temperature


def split_temperature(temperature: Temperature, size: int, count: int) -> list[Temperature]:
    """Return the temperature of each chunk of `size` of `count` tokens."""
    if isinstance(temperature, Tensor):
        return list(temperature.split(size))
    return [temperature] * max(1, -(-count // size))


_HEADS: "WeakKeyDictionary[PreTrainedModel, Head | None]" = WeakKeyDictionary()


def head_of(model: PreTrainedModel) -> Head | None:
    """Return a model's head, or None if it computes its logits in another way.

    Model families scale logits by settings of several names, some divide and some multiply: the
    head that reproduces the model's own logits on two tokens is taken.
    """
    if model not in _HEADS:
        _HEADS[model] = _found(model)
    return _HEADS[model]


@torch.no_grad()
def _found(model: PreTrainedModel) -> Head | None:
    layer = model.get_output_embeddings()
    if layer is None:
        return None
    tokens = torch.tensor([[1, 0]], device=model.device)  # in every vocabulary
    with evaluating(model):  # both sides: autocast would round the logits that are compared
        truth = model(input_ids=tokens, use_cache=False).logits[0].float()
        found = model.get_decoder()(input_ids=tokens, use_cache=False)
        hidden = getattr(found, "last_hidden_state", None)
        if hidden is None:  # for some models `get_decoder` returns the model itself
            return None
        within = tolerance(model) * float(truth.abs().max()) + 1e-6
        for head in _candidates(model, layer):
            logits = head.logits(hidden[0])
            if logits.shape == truth.shape and float((logits - truth).abs().max()) <= within:
                return head
    return None


def _candidates(model: PreTrainedModel, layer: nn.Module) -> Iterator[Head]:
    config: Any = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    names = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier")
    found = [float(value) for name in names if (value := getattr(config, name, None))]
    for factor in (1.0, *found, *(1 / value for value in found)):
        yield Head(layer, factor, cap)


def tolerance(model: PreTrainedModel) -> float:
    """Return the relative tolerance between two computations of the same logits."""
    is_exact = model.dtype in (torch.float32, torch.float64) and not is_flash(attention_of(model))
    return 1e-3 if is_exact else 3e-2


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Disable dropout and autocast; each module's mode is restored afterwards.

    Flash attention computes in no other precision than autocast's, so it keeps autocast.
    """
    training = [module for module in model.modules() if module.training]
    half = is_flash(attention_of(model))
    model.eval()
    try:
        with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=half):
            yield
    finally:
        for module in training:
            module.training = True


def of_tokens(
    head: Head,
    hidden_MD: Tensor,
    token_M: Tensor,
    *,
    temperature: Temperature,
    entropy: bool = False,
    max_logits_bytes: int = LOGITS_BYTES,
) -> list[Tensor]:
    """Return each token's log-prob [M] and, if wanted, the entropy [M], in nats and float32.

    Values and gradients are those of log-softmax. Logits are recomputed for the gradient, except
    those that fit into half of `max_logits_bytes`; the other half is for the current chunk. Raises
    TypeError if the head is not a linear layer.
    """
    if type(head.layer) is not nn.Linear:
        raise TypeError(f"the head must be a linear layer, got {type(head.layer).__name__}")
    weight_VD, vocabulary = own_part(head.layer.weight)
    bias_V: Tensor | None = getattr(head.layer, "bias", None)
    bias_V = None if bias_V is None else own_part(bias_V)[0]
    kind = hidden_MD.device.type
    # The function runs without autocast, so it gets its inputs in autocast's precision.
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden_MD, weight_VD = hidden_MD.to(dtype), weight_VD.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    size = _size(max_logits_bytes, len(weight_VD))
    settings = _Settings(head, temperature, entropy, size, vocabulary)
    with torch.autocast(kind, enabled=False):
        found: Any = _OfTokens.apply(hidden_MD, weight_VD, bias_V, token_M, settings)
    return list(found) if entropy else [found[0]]


def _size(max_logits_bytes: int, vocabulary: int) -> int:
    """Return the tokens of a chunk; the current one needs twice its logits in memory."""
    return max(1, max_logits_bytes // (4 * vocabulary * (KEPT + 2)))


@dataclass(frozen=True)
class _Settings:
    head: Head
    temperature: Temperature
    entropy: bool
    size: int
    """Tokens of one chunk."""
    vocabulary: VocabularyPart

    def chunks(self, count: int) -> list[slice]:
        """Return the chunks of `count` tokens; an empty one for 0."""
        return [slice(i, i + self.size) for i in range(0, max(1, count), self.size)]

    def of(self, at: slice) -> Temperature:
        """Return a chunk's temperature: a float, or a column [C, 1] if tokens have their own."""
        if isinstance(self.temperature, Tensor):
            return self.temperature[at, None]
        return self.temperature

    def logits(
        self, hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, at: slice
    ) -> Tensor:
        logits_CV = nn.functional.linear(hidden_CD, weight_VD, bias_V).float()
        logits_CV, temperature = self.head.finished(logits_CV), self.of(at)
        is_one = isinstance(temperature, float) and temperature == 1.0
        return logits_CV if is_one else logits_CV.div_(temperature)

    def slope(self, logits_CV: Tensor, at: slice) -> Tensor | float:
        """Return the derivative of the finished logits by the layer's output."""
        temperature = self.of(at)
        slope = self.head.factor / temperature
        if self.head.cap is None:
            return slope
        return slope * (1 - (logits_CV * (temperature / self.head.cap)).square())


class _OfTokens(torch.autograd.Function):
    """Log-prob and entropy of tokens, with the gradient written out: d log p_t / dz = 1_t - p."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        token_M: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, ...]:
        logprobs, entropies, norms, kept = [], [], [], []
        for at in settings.chunks(len(hidden_MD)):
            logits_CV = settings.logits(hidden_MD[at], weight_VD, bias_V, at)
            norm_C = settings.vocabulary.logsumexp(logits_CV)
            logprobs.append(settings.vocabulary.pick(logits_CV, token_M[at]) - norm_C)
            norms.append(norm_C)
            if settings.entropy:
                p_CV = (logits_CV - norm_C[:, None]).exp_()
                mean_C = settings.vocabulary.sum(p_CV.mul_(logits_CV).sum(-1))
                entropies.append(norm_C - mean_C)
            if len(kept) < KEPT and any(ctx.needs_input_grad):
                kept.append(logits_CV)
        out = [torch.cat(logprobs), *([torch.cat(entropies)] if settings.entropy else [])]
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V, token_M, torch.cat(norms), *out[1:])
        ctx.settings, ctx.kept = settings, kept
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, bias_V, token_M, norm_M, *entropy_M = ctx.saved_tensors
        settings: _Settings = ctx.settings
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        hidden_grad_MD = torch.empty_like(hidden_MD) if need_hidden else None
        # Sums over all chunks are in float32, whatever the weights are.
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if need_weight else None
        bias_grad_V = torch.zeros_like(bias_V, dtype=torch.float32) if need_bias else None
        for at in settings.chunks(len(hidden_MD)):
            hidden_CD = hidden_MD[at]
            if ctx.kept:
                logits_CV = ctx.kept.pop(0)  # it is overwritten, so used once only
            else:
                logits_CV = settings.logits(hidden_CD, weight_VD, bias_V, at)
            slope = settings.slope(logits_CV, at)
            message = [(gradients[1][at], entropy_M[0][at])] if entropy_M else []
            place_C, is_here_C = settings.vocabulary.places(token_M[at], logits_CV.shape[-1])
            grad_C = gradients[0][at]
            grad_CV = _slopes(logits_CV, norm_M[at], place_C, grad_C, is_here_C, *message)
            if not isinstance(slope, float) or slope != 1.0:
                grad_CV = grad_CV.mul_(slope)
            if bias_grad_V is not None:
                bias_grad_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(weight_VD.dtype)
            if hidden_grad_MD is not None:
                torch.mm(grad_CV, weight_VD, out=hidden_grad_MD[at])
            if weight_grad_VD is not None:
                _add_product(weight_grad_VD, grad_CV.t(), hidden_CD)
        return (
            None if hidden_grad_MD is None else settings.vocabulary.sum(hidden_grad_MD),
            None if weight_grad_VD is None else weight_grad_VD.to(weight_VD.dtype),
            None if bias_grad_V is None else bias_grad_V.to(bias_V.dtype),
            None,
            None,
        )


def _slopes(
    logits_CV: Tensor,
    norm_C: Tensor,
    place_C: Tensor,
    grad_C: Tensor,
    is_here_C: Tensor,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the gradient with respect to finished logits, computed in place: [C, V].

    That of the entropy H, whose gradient and value are `entropy`, is -p (log p + H).
    """
    logp_CV = logits_CV.sub_(norm_C[:, None])
    if entropy is None:
        out_CV = logp_CV.exp_().mul_(-grad_C[:, None])
    else:
        entropy_grad_C, entropy_C = entropy
        p_CV = logp_CV.exp()
        out_CV = logp_CV.add_(entropy_C[:, None]).mul_(entropy_grad_C[:, None])
        out_CV = out_CV.add_(grad_C[:, None]).mul_(p_CV).neg_()
    return out_CV.scatter_add_(-1, place_C[:, None], grad_C.where(is_here_C, 0.0)[:, None])


def _add_product(out: Tensor, one: Tensor, other: Tensor) -> None:
    if one.dtype == out.dtype:
        out.addmm_(one, other)
    else:
        out += one @ other
