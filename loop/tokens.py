"""Rows of text get tokens when they are drawn; rows of tokens keep theirs."""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from .models import prompt_ids, response_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXT_COLUMNS = ("messages", "prompt_text", "response_text")
"""What a row of text is made of: its messages, or else a prompt and a response."""


def tokenize(
    rows: pl.DataFrame, tokenizer: "PreTrainedTokenizerFast", *, documents: bool = False
) -> pl.DataFrame:
    """Fill token_ids and loss_mask where token_ids is NULL; column `was_text` says where that was.

    The last assistant message is the response, and alone trained on, with its end token; what
    comes before it is the prompt. Rows without a response stay without tokens, and so do rows whose
    messages are broken or that the chat template refuses.

    Of `documents` all tokens are trained on; one of text is its prompt_text and its response_text,
    without a chat template, and the end token.
    """
    was_text = rows["token_ids"].is_null()
    rows = rows.with_columns(was_text.alias("was_text"))
    if documents:
        every = pl.col("token_ids").list.eval(pl.lit(True))  # noqa: FBT003
        rows = rows.with_columns(loss_mask=every)
    if not was_text.any():
        return rows
    texts = rows.filter(was_text).unique("experience_id", keep="first", maintain_order=True)
    read = _document if documents else _tokens
    made = [_tried(row, tokenizer, read) for row in texts.iter_rows(named=True)]
    filled = pl.DataFrame(
        {
            "experience_id": texts["experience_id"],
            "token_ids": pl.Series([t for t, _ in made], dtype=pl.List(pl.Int32)),
            "loss_mask": pl.Series([m for _, m in made], dtype=pl.List(pl.Boolean)),
        }
    )
    return rows.update(filled, on="experience_id")


_Tokens = tuple[list[int] | None, list[bool] | None]


def _tried(
    row: Mapping[str, Any],
    tokenizer: "PreTrainedTokenizerFast",
    read: Callable[[Mapping[str, Any], "PreTrainedTokenizerFast"], _Tokens],
) -> _Tokens:
    try:
        return read(row, tokenizer)
    except Exception:  # noqa: BLE001  templates are others' programs, and rows hold anything
        return None, None


def _document(row: Mapping[str, Any], tokenizer: "PreTrainedTokenizerFast") -> _Tokens:
    texts = [row[name] for name in ("prompt_text", "response_text") if row[name] is not None]
    if not texts:
        return None, None
    ids = response_ids(tokenizer, "".join(texts))
    return ids, [True] * len(ids)


def _tokens(row: Mapping[str, Any], tokenizer: "PreTrainedTokenizerFast") -> _Tokens:
    messages = json.loads(row["messages"]) if row["messages"] else None
    if messages and messages[-1].get("role") == "assistant":
        before, response = messages[:-1], messages[-1].get("content")
    else:
        before = messages or [{"role": "user", "content": row["prompt_text"] or ""}]
        response = row["response_text"]
    if response is None:
        return None, None
    prompt = prompt_ids(tokenizer, before)
    answer = response_ids(tokenizer, str(response))
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)
