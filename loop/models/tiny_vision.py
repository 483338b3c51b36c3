"""A small Qwen2.5-VL or Qwen3-VL from a configuration, with random weights."""

from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from ..config.model import RopeParameters, TinyModel, TinyVision
from .rope import scale_rope

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

START, IMAGE, END, VIDEO = SPECIAL = (
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<|video_pad|>",
)
"""Tokens that the tokenizer must have."""
_MERGE = 2
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + START + IMAGE + END + "{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def make_tiny_vision(
    spec: TinyModel,
    vision: TinyVision,
    tokenizer: "PreTrainedTokenizerFast",
    *,
    seed: int,
    rope: RopeParameters | None = None,
) -> "PreTrainedModel":
    """Create a small model; an image is a token for each 2 x 2 of its patches."""
    start, image, end, video = (tokenizer.get_vocab()[token] for token in SPECIAL)
    half = spec.hidden_size // spec.heads // 2
    is_third = vision.family == "qwen3_vl"
    own: dict[str, Any] = (
        {"deepstack_visual_indexes": list(range(vision.layers)), "num_position_embeddings": 256}
        if is_third
        # all layers see the whole image
        else {"fullatt_block_indexes": list(range(vision.layers))}
    )
    kind = Qwen3VLConfig if is_third else Qwen2_5_VLConfig
    config = kind(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size or 4 * spec.hidden_size,
            "num_hidden_layers": spec.layers,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.heads,
            **({"head_dim": 2 * half} if is_third else {}),
            "max_position_embeddings": spec.max_length,
            "initializer_range": spec.init_std,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                # frequencies of time, height and width
                "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
                **({"mrope_interleaved": True} if is_third else {}),
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": vision.layers,
            "hidden_size": vision.hidden_size,
            "intermediate_size": 2 * vision.hidden_size,
            "num_heads": vision.heads,
            "patch_size": vision.patch_size,
            "spatial_merge_size": _MERGE,
            "out_hidden_size": spec.hidden_size,
            "initializer_range": spec.init_std,
            **own,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    scale_rope(config, rope)
    config.image_processor = {
        "size": {
            "shortest_edge": (vision.patch_size * _MERGE) ** 2,
            "longest_edge": vision.max_pixels,
        },
        "patch_size": vision.patch_size,
        "merge_size": _MERGE,
        "temporal_patch_size": 2,
    }
    with torch.random.fork_rng(devices=[]):  # the caller's generator continues as if unused
        torch.manual_seed(seed)
        made = Qwen3VLForConditionalGeneration if is_third else Qwen2_5_VLForConditionalGeneration
        return made(config)
