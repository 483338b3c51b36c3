"""What penalties, biases and least lengths make of logits, token by token in float64."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlake.loop.inference.policy import Sampling

END = 1
"""The end token of the tiny models."""


def changed(
    logits: np.ndarray[Any, Any], prompt: Sequence[int], answer: Sequence[int], how: Sampling
) -> np.ndarray[Any, Any]:
    """The logits that are sampled from, token by token."""
    made = logits.copy()
    for token, bias in how.logit_bias:
        made[token] += bias
    for token in range(len(made)):
        if token in prompt or token in answer:
            up = made[token] > 0
            made[token] *= 1 / how.repetition_penalty if up else how.repetition_penalty
        made[token] -= how.frequency_penalty * answer.count(token)
        made[token] -= how.presence_penalty * (token in answer)
    if len(answer) < how.min_tokens:
        made[END] = -np.inf
    return made
