"""Tokenize rows of text when they are drawn; rows with tokens keep theirs."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import polars as pl

from ...store.conversation import goes_on, shared
from ...store.records import Message
from ..models.chat_tokenizer import ConversationTokenizer
from ..models.load import document_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ..models.images import Images

T = TypeVar("T")

_FIRST = "first_message_trained_on"
_TEXT = ("messages", "prompt_text", "response_text")


def tokenize(
    rows: pl.DataFrame,
    tokenizer: "PreTrainedTokenizerFast",
    *,
    documents: bool = False,
    are_pairs: bool = False,
    images: "Images | None" = None,
) -> pl.DataFrame:
    """Fill token_ids and loss_mask where token_ids is NULL, which column `was_text` records.

    Assistant turns are trained on, with their tool calls and end tokens; turns of users and tools
    are not. Rows without an assistant turn stay without tokens, and so do rows with invalid
    messages or that the chat template refuses. If rows `are_pairs`, a better and a worse one in
    turn, only the turns after their common prefix are trained on.

    All tokens of `documents` are trained on; a document is its prompt_text and response_text,
    without a chat template, between the tokens that begin and end a text.
    """
    was_text = rows["token_ids"].is_null()
    rows = rows.with_columns(was_text.alias("was_text"))
    if documents:
        every = pl.col("token_ids").list.eval(pl.lit(True))  # noqa: FBT003
        rows = rows.with_columns(loss_mask=every)
    if not was_text.any():
        return rows
    rows = rows.with_columns(_shared(rows) if are_pairs else pl.lit(0, pl.Int64).alias(_FIRST))
    # A row drawn twice is tokenized once; in two pairs, its common prefixes may differ.
    key = ["experience_id", _FIRST]
    texts = rows.filter(was_text).unique(key, keep="first", maintain_order=True)
    read = partial(_document, tokenizer) if documents else _Conversations(tokenizer, images)
    made = [_tried(row, read, (None, None)) for row in texts.iter_rows(named=True)]
    filled = pl.DataFrame(
        {
            **texts.select(key).to_dict(),
            "token_ids": pl.Series([t for t, _ in made], dtype=pl.List(pl.Int32)),
            "loss_mask": pl.Series([m for _, m in made], dtype=pl.List(pl.Boolean)),
        }
    )
    return rows.update(filled, on=key).drop(_FIRST)


def _shared(rows: pl.DataFrame) -> pl.Series:
    """Return for each row how many leading messages it shares with the other row of its pair."""
    each = [_tried(row, _conversation, []) for row in rows.select(_TEXT).iter_rows(named=True)]
    counts = [shared(a, b) for a, b in zip(each[::2], each[1::2], strict=True)]
    return pl.Series(_FIRST, [n for n in counts for _ in range(2)], pl.Int64)


_Tokens = tuple[list[int] | None, list[bool] | None]


def _tried(row: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T], otherwise: T) -> T:
    try:
        return read(row)
    except Exception:  # noqa: BLE001  rows hold anything
        return otherwise


def _document(tokenizer: "PreTrainedTokenizerFast", row: Mapping[str, Any]) -> _Tokens:
    texts = [row[name] for name in ("prompt_text", "response_text") if row[name] is not None]
    if not texts:
        return None, None
    ids = document_ids(tokenizer, "".join(texts))
    return ids, [True] * len(ids)


class _Conversations:
    """Tokenizes rows that are conversations."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", images: "Images | None") -> None:
        self._tokens = ConversationTokenizer(tokenizer, is_exact=False, images=images)

    def __call__(self, row: Mapping[str, Any]) -> _Tokens:
        tools = row.get("tools")
        tools = json.loads(tools) if tools else None
        found = self._tokens(_conversation(row), tools, first=row[_FIRST])
        if isinstance(found, str):
            return None, None
        return list(found.token_ids), list(found.loss_mask)


def _conversation(row: Mapping[str, Any]) -> list[Message]:
    """Return a row's messages, with its answer appended when the messages do not contain it."""
    response = row["response_text"]
    prompt = [{"role": "user", "content": row["prompt_text"] or ""}]
    messages = json.loads(row["messages"]) if row["messages"] else prompt
    answer = {"role": "assistant", "content": response}
    return [*messages, answer] if goes_on(messages, response) else messages
