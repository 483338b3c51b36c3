"""Run a transformers model on the KV cache: prefill prompts, then decode token by token."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....store.errors import ConfigError
from ...models.images import Images
from ...models.lm_head import head_of, tolerance
from ...models.routers import prepared
from ...models.vision import offset, shown
from .kv_cache import ATTENTION, Decode, KVCache, Prefill, padded

READ_TOKENS = 8192
"""Most tokens of one prefill with padding, unless it is a single sequence."""
Shown = tuple[tuple[int, ...], tuple[str, ...]]
"""A sequence's tokens and images."""
KNOWN_LAYERS = {"full_attention", "sliding_attention"}


class ModelRunner:
    """A model and its KV cache, whose first rows are the running sequences."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        most_tokens: int,
        images: Images | None = None,
        record_experts: bool = False,
    ) -> None:
        """Raises ConfigError for a model with state other than keys and values."""
        self.model, self._images = model, images
        self.experts: list[list[list[int]]] = []
        """Of each sequence of the last pass, the experts of the tokens read, if recorded."""
        self._routing = prepared(model) if record_experts else None
        if self._routing is not None:
            self._routing.chosen = {}
        self.slots = KVCache()
        self._most = most_tokens
        _check_layers(model)
        with _refusing(model):
            self._head = head_of(model)
            self._decoder = model.get_decoder()
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.long, device=model.device)
        _fit(model, self)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.device

    def reserve(self, rows: int, length: int, *, used: int) -> None:
        """Make room for rows of a length, keeping the first `used` rows."""
        self.slots.reserve(rows, length, used=used, most=self._most)

    def read(
        self,
        sequences: Sequence[tuple[int, ...]],
        *,
        first: int,
        media: Sequence[tuple[str, ...]] | None = None,
    ) -> Tensor:
        """Prefill the rows from `first` on; return the logits of the next tokens [B, V].

        Equal sequences, such as the prompts of a group, are read once. `media` are the images of
        each.
        """
        shown_as = list(zip(sequences, media or [()] * len(sequences), strict=True))
        unique = list(dict.fromkeys(shown_as))
        parts = _parts(unique)
        if len(parts) == 1:
            return self._read(parts[0], shown_as, slice(first, first + len(sequences)))
        experts: list[list[list[int]]] = [[]] * len(sequences)
        made: list[Tensor] = [torch.empty(0)] * len(sequences)
        for part in parts:
            mine = [i for i, sequence in enumerate(shown_as) if sequence in set(part)]
            rows = self._tensor([first + i for i in mine])
            found_MV = self._read(part, [shown_as[i] for i in mine], rows)
            for i, logits_V in zip(mine, found_MV, strict=True):
                made[i] = logits_V
            for i, read in zip(mine, self.experts, strict=False):
                experts[i] = read
        self.experts = experts
        return torch.stack(made)

    def _read(
        self, unique: list[Shown], sequences: Sequence[Shown], rows: slice | Tensor
    ) -> Tensor:
        """Read U different sequences at once, into the rows of all equal sequences."""
        number = {sequence: u for u, sequence in enumerate(unique)}
        source_M = None
        if len(unique) < len(sequences):
            source_M = self._tensor([number[sequence] for sequence in sequences])
        ids_UP = padded([tokens for tokens, _ in unique], self.device)
        index_UP = torch.arange(ids_UP.shape[1], device=self.device).expand_as(ids_UP)
        last_U = self._tensor([len(tokens) - 1 for tokens, _ in unique])
        asked: dict[str, Any] = {"input_ids": ids_UP, "position_ids": index_UP}
        media = [ids for _, ids in unique]
        if any(media):
            assert self._images is not None, "the policy refuses images without them"
            asked = {**shown(self.model, ids_UP, media, self._images)}
        logits_UV = self._logits(asked, last_U, Prefill(self.slots, rows, source_M))
        if self._routing is not None:
            all_UPX = self._routing.taken().unflatten(0, ids_UP.shape).tolist()
            read = {one: all_UPX[u][: len(one[0])] for one, u in number.items()}
            self.experts = [read[sequence] for sequence in sequences]
        return logits_UV if source_M is None else logits_UV.index_select(0, source_M)

    def write(
        self,
        tokens: Sequence[int],
        lengths: Sequence[int],
        media: Sequence[tuple[str, ...]] | None = None,
    ) -> Tensor:
        """Append a token to each of the first rows; return the logits of the next ones [B, V]."""
        longest, at_B = max(lengths), self._tensor(lengths)
        step = Decode(self.slots, at_B, longest + 1, is_even=longest == min(lengths))
        place_B = at_B
        if media is not None and any(media) and self._images is not None:
            # an image takes fewer positions than tokens
            place_B = at_B + self._tensor([offset(self._images.grids(ids)) for ids in media])
        asked = {"input_ids": self._tensor(tokens)[:, None], "position_ids": place_B[:, None]}
        logits_BV = self._logits(asked, None, step)
        if self._routing is not None:
            self.experts = [[experts_X] for experts_X in self._routing.taken().tolist()]
        return logits_BV

    def _logits(
        self, given: Mapping[str, Any], last_B: Tensor | None, slots: Prefill | Decode
    ) -> Tensor:
        """Return the logits of each sequence's last token [B, V]."""
        asked: dict[str, Any] = {
            **given,
            # transformers passes on a mask of four dimensions unchanged; the cache has the real one
            "attention_mask": self._mask,
            "use_cache": False,
            "slots": slots,
        }
        if self._routing is not None:
            self._routing.begin(None, None)
        if self._head is None:
            return _last(self.model(**asked).logits, last_B).float()
        return self._head.logits(_last(self._decoder(**asked).last_hidden_state, last_B))

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self.device)


def _last(found_BTX: Tensor, last_B: Tensor | None) -> Tensor:
    if last_B is None:
        return found_BTX[:, -1]
    return found_BTX[torch.arange(len(found_BTX), device=found_BTX.device), last_B]


def _length(sequence: Shown) -> int:
    return len(sequence[0])


def _parts(sequences: list[Shown]) -> list[list[Shown]]:
    """Split sequences into parts that are small enough for one prefill, by length."""
    if len(sequences) * max(map(_length, sequences)) <= READ_TOKENS:
        return [sequences]
    parts: list[list[Shown]] = []
    # Neighbors of similar length need the least padding.
    for sequence in sorted(sequences, key=_length):
        if parts and (len(parts[-1]) + 1) * _length(sequence) <= READ_TOKENS:
            parts[-1].append(sequence)
        else:
            parts.append([sequence])
    return parts


@torch.inference_mode()
def _fit(model: PreTrainedModel, network: ModelRunner) -> None:
    """Let a model attend through the cache, and check on a few tokens that its logits agree."""
    size = model.config.get_text_config().vocab_size
    # Of two lengths, so that padding and masks are tried as well.
    rows = [[i % size for i in range(9)], [(7 * i + 1) % size for i in range(6)]]
    before = str(model.config._attn_implementation)  # pyright: ignore[reportPrivateUsage]
    is_fit = False
    try:
        with _refusing(model):
            inputs = [torch.tensor([row], device=model.device) for row in rows]
            logits = [model(input_ids=ids, use_cache=False).logits[0, -1] for ids in inputs]
            expected = torch.stack(logits).float()
            model.set_attn_implementation(ATTENTION)
            network.reserve(2, 9, used=0)
            network.read([tuple(row[:-3]) for row in rows], first=0)
            for back in (3, 2):
                network.write([r[-back] for r in rows], [len(r) - back for r in rows])
            found = network.write([r[-1] for r in rows], [len(r) - 1 for r in rows])
        # The constant is for logits that are all 0, to which no tolerance is relative.
        most = tolerance(model) * float(expected.abs().max()) + 1e-6
        is_fit = float((found - expected).abs().max()) <= most
    finally:
        network.slots.clear()
        if not is_fit:
            model.set_attn_implementation(before)
    if not is_fit:
        raise ConfigError(
            f"the transformers engine cannot run `{type(model).__name__}`: with only its keys and "
            "values its logits differ; take `engine: {vllm: {}}`"
        )


def _check_layers(model: PreTrainedModel) -> None:
    name = type(model).__name__
    config = model.config.get_text_config()
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS):
        raise ConfigError(
            f"the transformers engine cannot run `{name}`: it has layers of `{others[0]}`, which "
            "remember more than keys and values; take `engine: {vllm: {}}`"
        )


@contextmanager
def _refusing(model: PreTrainedModel) -> Iterator[None]:
    """Turn an error of a model on its first tokens into ConfigError."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        message = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"the transformers engine cannot run `{type(model).__name__}`: "
            f"{type(error).__name__}: {message}; take `engine: {{vllm: {{}}}}`"
        ) from error
