"""Prompts as vLLM's engine takes them: tokens, and images prepared as the trainer sees them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ...models.images import Images


def prompt_of(
    token_ids: Sequence[int], media: Sequence[str] = (), images: Images | None = None
) -> dict[str, Any]:
    """Return a prompt whose first tokens of images stand for `media`.

    vLLM's own processor is not used: it would decode and cut the images a second way.
    """
    if not media:
        return {"type": "token", "prompt_token_ids": list(token_ids)}
    assert images is not None, "the policy refuses images without them"
    import torch
    from transformers import BatchFeature
    from vllm.multimodal.inputs import (  # pyright: ignore[reportMissingImports]
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    prepared = images.prepared(media)
    sizes = torch.tensor([len(image.patches) for image in prepared])
    features = {
        "pixel_values": torch.cat([image.patches for image in prepared]),
        "image_grid_thw": torch.tensor([image.grid_thw for image in prepared]),
    }
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    places = [i for i, token in enumerate(token_ids) if token == images.token_id]
    counts = [rows * columns for rows, columns in images.grids(media)]
    starts = [places[at] for at in accumulate(counts[:-1], initial=0)]
    return {
        "type": "multimodal",
        "prompt_token_ids": list(token_ids),
        "mm_kwargs": MultiModalKwargsItems.from_hf_inputs(BatchFeature(features), fields),
        "mm_hashes": {"image": list(media)},
        "mm_placeholders": {
            "image": [PlaceholderRange(*place) for place in zip(starts, counts, strict=True)]
        },
    }
