"""What the language model of a vision-language model reads: embeddings and positions of tokens."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .images import Grid, Images

Media = Sequence[Sequence[str]]
"""The ids of the images of each sequence, in their order."""


def shown(
    model: PreTrainedModel, token_ids_BT: Tensor, media: Media, images: Images
) -> dict[str, Tensor]:
    """Return `inputs_embeds` [B, T, D] and `position_ids` [3, B, T] of sequences with images.

    The first tokens of an image in a sequence are its images'; what is sampled later is text. An
    image at the end may be cut off.

    Of Qwen3-VL the embeddings are wider: behind them is what its first layers add to their hidden
    states at the tokens of images (DeepStack, arXiv:2406.04334), which the model takes apart.
    """
    is_image_BT = token_ids_BT == images.token_id
    most_B = torch.tensor([images.count(ids) for ids in media], device=token_ids_BT.device)
    is_image_BT &= is_image_BT.cumsum(1) <= most_B[:, None]
    embeds_BTD = model.get_input_embeddings()(token_ids_BT)
    counts = is_image_BT.sum(1).tolist()
    features_PD = _features(model, media, counts, images)
    if features_PD is not None:
        wider = features_PD.shape[1] - embeds_BTD.shape[2]
        if wider:
            embeds_BTD = torch.nn.functional.pad(embeds_BTD, (0, wider))
            _take_apart(model)
        spots = is_image_BT[..., None].expand_as(embeds_BTD)
        embeds_BTD = embeds_BTD.masked_scatter(spots, features_PD.to(embeds_BTD.dtype))
    rows = zip(is_image_BT, media, strict=True)
    found = [positions(is_image_T, images.grids(ids)) for is_image_T, ids in rows]
    return {"inputs_embeds": embeds_BTD, "position_ids": torch.stack(found, 1)}


def _features(
    model: PreTrainedModel, media: Media, counts: Sequence[int], images: Images
) -> Tensor | None:
    """Return the features of the images of all sequences [P, D], each image computed once."""
    wanted = list(dict.fromkeys(one for ids in media for one in ids))
    if not wanted:
        return None
    device = model.device
    prepared = images.prepared(wanted)
    patches = torch.cat([image.patches for image in prepared]).to(device)
    grid = torch.tensor([image.grid_thw for image in prepared], device=device)
    vision: Any = model
    found = vision.get_image_features(patches, grid)
    layers = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    features = [torch.cat(parts, -1) for parts in zip(*layers, strict=True)]
    of = dict(zip(wanted, features, strict=True))
    rows = [
        torch.cat([of[one] for one in ids])[:count]
        for ids, count in zip(media, counts, strict=True)
        if ids
    ]
    return torch.cat(rows)


def _take_apart(model: PreTrainedModel) -> None:
    """Let a model's decoder take what its layers add out of embeddings that are wider."""
    decoder: Any = model.get_decoder()
    if decoder not in _WIDE:
        _WIDE.add(decoder)
        decoder.register_forward_pre_hook(_apart, with_kwargs=True)


_WIDE: "WeakSet[nn.Module]" = WeakSet()


def _apart(decoder: nn.Module, arguments: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    embeds_BTD, size = given.get("inputs_embeds"), decoder.config.hidden_size  # type: ignore[union-attr]
    if embeds_BTD is None or embeds_BTD.shape[-1] == size:
        return arguments, given
    first_BTD, *added_BTD = embeds_BTD.split(size, -1)
    is_any_BT = torch.ones(first_BTD.shape[:2], dtype=torch.bool, device=first_BTD.device)
    # zeros at the tokens of text
    added = [part.flatten(0, 1) for part in added_BTD]
    more = {"visual_pos_masks": is_any_BT, "deepstack_visual_embeds": added}
    return arguments, {**given, "inputs_embeds": first_BTD, **more}


def positions(is_image_T: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Return the positions of a sequence's tokens in time, height and width [3, T].

    Those of an image count its rows and columns from the position that follows the text before it;
    the text goes on after the larger of both (M-RoPE, arXiv:2409.12191).
    """
    length, device = len(is_image_T), is_image_T.device
    found_3T = torch.arange(length, device=device).repeat(3, 1)
    starts = is_image_T.nonzero()[:, 0]
    at = 0
    for rows, columns in grids:
        if at >= len(starts):
            break
        start, size = int(starts[at]), rows * columns
        stop = min(start + size, length)
        base = found_3T[0, start].clone()
        grid = torch.arange(size, device=device)
        of_image = torch.stack([grid * 0, grid // columns, grid % columns])
        found_3T[:, start:stop] = base + of_image[:, : stop - start]
        found_3T[:, stop:] += max(rows, columns) - size
        at += size
    return found_3T


def offset(grids: Sequence[Grid]) -> int:
    """Return the position of a token after all images, less its index."""
    return sum(max(rows, columns) - rows * columns for rows, columns in grids)
