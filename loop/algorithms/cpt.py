"""Continued pre-training (CPT): maximize the log-likelihood of whole texts.

SFT on documents: every token of a row is trained on, whatever its `loss_mask`, except the first,
which nothing predicts. A row of text is its `prompt_text` followed by its `response_text`, without
a chat template, between the token that the tokenizer adds to texts (`<s>`), if any, and the end
token. Assumes that the texts are worth learning.

Metrics: those of SFT.
"""

from dataclasses import dataclass
from typing import ClassVar

from .sft import SFT


@dataclass(frozen=True, kw_only=True)
class CPT(SFT):
    """Negative log-likelihood of all tokens of plain texts."""

    documents: ClassVar[bool] = True
