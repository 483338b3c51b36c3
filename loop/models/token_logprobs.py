"""Log-probs and statistics of the tokens of a batch, without all logits [B, T, V] in memory."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ...store.errors import ConfigError
from .context_parallel import Context
from .divergence import Compare, compared
from .images import Images
from .lm_head import (
    LOGITS_BYTES,
    Head,
    Temperature,
    head_of,
    logprobs_at,
    of_tokens,
    split_temperature,
)
from .packing import Select, can_pack, hidden
from .routers import Routing
from .vision import Media, shown

Statistic = Callable[[Tensor, Tensor], Tensor]
"""(log-probs [M, V], sampled tokens [M]) -> one number per token [M]."""

STATISTICS: Mapping[str, Statistic] = {
    "logprobs": lambda logprobs_MV, token_M: logprobs_MV.gather(-1, token_M[:, None])[:, 0],
    "entropy": lambda logprobs_MV, token_M: -(logprobs_MV.exp() * logprobs_MV).sum(-1),
    "discriminator": lambda logprobs_MV, token_M: _discriminator(logprobs_MV),
}
"""Statistics of a token by its distribution over the vocabulary."""


def _discriminator(logprobs_MV: Tensor) -> Tensor:
    """Return the mean of the discriminator p (H + log p) of arXiv:2602.03392: [M]."""
    p_MV = logprobs_MV.exp()
    entropy_M1 = -(p_MV * logprobs_MV).sum(-1, keepdim=True)
    return (p_MV.square() * (entropy_M1 + logprobs_MV)).sum(-1)


class Scorer(nn.Module):
    """Computes the log-probs of tokens by a language model, all in `forward`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        packing: bool | None = False,
        max_logits_bytes: int = LOGITS_BYTES,
    ) -> None:
        """`packing` is whether sequences are packed; None: if the model supports it.

        Raises ConfigError if `packing` is true and the model does not support it.
        """
        super().__init__()
        self.model = model
        self.packs = packing is not False and can_pack(model)
        """Whether sequences are packed without padding."""
        self.max_logits_bytes = max_logits_bytes
        self.images: Images | None = None
        """The images that sequences may show."""
        self.context: Context | None = None
        """The processes that divide packed sequences; None: this one has all of them."""
        self.routing: Routing | None = None
        """What the routers of the model choose, if it is replayed or balanced."""
        self._head = head_of(model)
        if packing and not self.packs:
            raise ConfigError(
                f"`trainer.packing` is true, and `{type(model).__name__}` does not support packed "
                "sequences; set it to auto or false"
            )

    def forward(
        self,
        token_ids_BT: Tensor,
        mask_BT: Tensor,
        *,
        temperature: Temperature = 1.0,
        statistics: Sequence[str] = ("logprobs",),
        against: tuple[PreTrainedModel, Compare] | None = None,
        media: Media = (),
        routed_experts_BTX: Tensor | None = None,
        counts: bool = True,
    ) -> dict[str, Tensor]:
        """Return statistics of the tokens in the mask [B, T], 0 for the others.

        The temperature is one number, or one per row [B]; `media` are the images of each row. No
        attention mask is needed: padding is on the right, which causal attention never sees. With
        `against`, a teacher and a comparison of both distributions, the result is in `vocabulary`.
        Routers choose `routed_experts_BTX`, where given; `counts` is whether their choices count in
        the load of the experts.
        """
        wanted_BT = nn.functional.pad(mask_BT[:, 1:] > 0, (0, 1))
        temperature = _of_each(temperature, wanted_BT)
        routing = self.routing

        def before(select: Select) -> None:
            if routing is not None:
                last_B1 = _after_last(wanted_BT)[:, None]
                place_T = torch.arange(wanted_BT.shape[1], device=wanted_BT.device)
                given = None if routed_experts_BTX is None else select(routed_experts_BTX)
                routing.begin(given, select((place_T < last_B1) & counts))

        if against is not None:
            before(lambda values_BT: values_BT.flatten(0, 1))
            return compared(
                self.model,
                *against,
                token_ids_BT,
                mask_BT,
                temperature=temperature,
                chunk_bytes=self.max_logits_bytes,
            )
        token_M = token_ids_BT.roll(-1, 1)[wanted_BT]
        given = None
        if any(media):
            assert self.images is not None, "rows with images are refused without them"
            given = shown(self.model, token_ids_BT, media, self.images)
        found = self._found(
            token_ids_BT, wanted_BT, token_M, temperature, statistics, before, given
        )
        if routing is not None:
            routing.end()
        return {name: _placed(found[name], wanted_BT) for name in statistics}

    def _found(
        self,
        token_ids_BT: Tensor,
        wanted_BT: Tensor,
        token_M: Tensor,
        temperature: Temperature,
        names: Sequence[str],
        before: Callable[[Select], None],
        given: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return statistics of the tokens after wanted positions: each [M]."""
        head = self._head
        if head is None:  # only the model itself can compute its logits
            assert given is None, "the vision-language models that are known have a head"
            before(lambda values_BT: values_BT.flatten(0, 1))
            logits_BTV = self.model(input_ids=token_ids_BT, use_cache=False).logits
            logprobs_MV = logprobs_at(logits_BTV[wanted_BT].float(), temperature)
            return {name: STATISTICS[name](logprobs_MV, token_M) for name in names}
        hidden_MD, at = hidden(
            self.model.get_decoder(),
            token_ids_BT,
            wanted_BT,
            packed=self.packs,
            context=self.context,
            given=given,
            before=None if self.routing is None else before,
        )
        own = temperature[at] if isinstance(temperature, Tensor) else temperature
        found = self._of_hidden(head, hidden_MD, token_M[at], own, names)
        if self.context is None:
            return found
        return {
            name: self.context.gathered(values_M, at, len(token_M))
            for name, values_M in found.items()
        }

    def _of_hidden(
        self,
        head: Head,
        hidden_MD: Tensor,
        token_M: Tensor,
        temperature: Temperature,
        names: Sequence[str],
    ) -> dict[str, Tensor]:
        if type(head.layer) is not nn.Linear or not set(names) <= {"logprobs", "entropy"}:
            return self._chunked(head, hidden_MD, token_M, temperature, names)
        values = of_tokens(
            head,
            hidden_MD,
            token_M,
            temperature=temperature,
            entropy="entropy" in names,
            max_logits_bytes=self.max_logits_bytes,
        )
        return dict(zip(("logprobs", "entropy"), values, strict=False))

    def _chunked(
        self,
        head: Head,
        hidden_MD: Tensor,
        token_M: Tensor,
        temperature: Temperature,
        names: Sequence[str],
    ) -> dict[str, Tensor]:
        def part(hidden_CD: Tensor, token_C: Tensor, at: Temperature) -> tuple[Tensor, ...]:
            logprobs_CV = head.logprobs(hidden_CD, temperature=at)
            return tuple(STATISTICS[name](logprobs_CV, token_C) for name in names)

        size = max(
            1, self.max_logits_bytes // (16 * self.model.config.get_text_config().vocab_size)
        )
        at = split_temperature(temperature, size, len(token_M))
        chunks = [
            checkpoint(part, *one, use_reentrant=False) if torch.is_grad_enabled() else part(*one)
            for one in zip(hidden_MD.split(size), token_M.split(size), at, strict=True)
        ]
        return {
            name: torch.cat(values)
            for name, values in zip(names, zip(*chunks, strict=True), strict=True)
        }


def _after_last(wanted_BT: Tensor) -> Tensor:
    """Return how many tokens of each sequence have an effect on wanted positions: [B]."""
    place_T = torch.arange(1, wanted_BT.shape[1] + 1, device=wanted_BT.device)
    return (wanted_BT * place_T).amax(1)


def _of_each(temperature: Temperature, wanted_BT: Tensor) -> Temperature:
    """Return the temperature of the tokens after wanted positions [M], or their common one."""
    if not isinstance(temperature, Tensor):
        return temperature
    # One transfer from the GPU. A common temperature is returned as a number: 1 needs no division.
    lowest, highest = torch.stack(temperature.aminmax()).tolist()
    if lowest == highest:
        return lowest
    return temperature[:, None].expand_as(wanted_BT)[wanted_BT]


def _placed(values_M: Tensor, wanted_BT: Tensor) -> Tensor:
    """Return values of next tokens at the positions of these tokens, 0 elsewhere: [B, T]."""
    full_BT = values_M.new_zeros(wanted_BT.shape).masked_scatter(wanted_BT, values_M)
    return full_BT.roll(1, 1)


def token_logprobs(
    model: PreTrainedModel, token_ids_BT: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Return the log-prob of each token given those before it [B, T], in nats; 0 for the first."""
    mask_BT = torch.ones_like(token_ids_BT)
    return Scorer(model)(token_ids_BT, mask_BT, temperature=temperature)["logprobs"]
