"""Tokenize rows of text at import; rows that have tokens keep them."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from ..records import Message
from ..schema import TABLES
from .select_columns import values_of, with_column

_KINDS = {c.name: c.type for c in TABLES["experiences"].columns}


@dataclass(frozen=True)
class Tokens:
    """A conversation as tokens; the mask is true where an assistant wrote them."""

    token_ids: Sequence[int]
    loss_mask: Sequence[bool]


class Tokenizer(Protocol):
    """Makes tokens of conversations."""

    @property
    def digest(self) -> str:
        """A digest of its vocabulary, rules and chat template."""
        ...

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> Tokens | str:
        """Return the tokens, or a short reason why there are none."""
        ...


@dataclass
class Tokenization:
    """The tokenizer of an import, and how many rows it tokenized."""

    tokenizer: Tokenizer
    done: int = 0
    """Rows that got tokens."""
    why_not: Counter[str] = field(default_factory=Counter)
    """Rows that stay text, by reason."""

    def fill(self, rows: pa.Table, conversations: Sequence[Sequence[Message]]) -> pa.Table:
        """Fill in the tokens of rows that have none; log-probs are left as they are: NULL."""
        names = ("token_ids", "loss_mask", "prompt_length", "num_tokens", "tokenizer")
        made = {name: values_of(rows, name) for name in names}
        tools = values_of(rows, "tools")
        for i, ids in enumerate(made["token_ids"]):
            # sampled tokens are the truth: text that decodes to them may encode to others
            if ids is not None:
                continue
            found = self._tokens(conversations[i], tools[i])
            if found is not None:
                mask = list(found.loss_mask)
                made["token_ids"][i], made["loss_mask"][i] = list(found.token_ids), mask
                # a loss mask may have gaps between turns: only its first token ends the prompt
                made["prompt_length"][i] = mask.index(True)
                made["num_tokens"][i] = len(mask)
                made["tokenizer"][i] = self.tokenizer.digest
        for name in names:
            rows = with_column(rows, name, made[name], _KINDS[name])
        return rows

    def _tokens(self, messages: Sequence[Message], tools: str | None) -> Tokens | None:
        found = self.tokenizer(messages, json.loads(tools) if tools else None)
        if isinstance(found, str):
            self.why_not[found] += 1
            return None
        self.done += 1
        return found


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the digest of a tokenizer's vocabulary, rules and chat template."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("padding", "truncation"):  # settings of the last call, not rules
        rules.pop(name, None)
    text = json.dumps([rules, tokenizer.chat_template], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
