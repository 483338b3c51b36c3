"""The tokens of drawn rows: text is tokenized, tokens of another tokenizer are not trained on.

Rows with tokens of the policy's tokenizer keep theirs.
"""

import json
import logging
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import polars as pl

from ...store.conversation import goes_on, shared
from ...store.errors import JobError, NotFoundError
from ...store.image_parts import media_ids
from ...store.records import Message
from ...store.schema import PER_TOKEN
from ..models.chat_tokenizer import ConversationTokenizer
from ..models.load import document_ids, tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ..models.images import Images

T = TypeVar("T")

_FIRST = "first_message_trained_on"
_TEXT = ("messages", "prompt_text", "response_text")
_FOREIGN = "why_foreign"
"""Column that says why a row's tokens cannot be those of the policy."""
_OF_TOKENS = ("token_ids", *PER_TOKEN)
_SHOWS = '"media_id"'
_log = logging.getLogger(__name__)


class TokenCheck:
    """Compares the tokenizer of rows with the policy's.

    Rows whose `tokenizer` is NULL, such as rows imported with token IDs, are assumed to have the
    policy's: only their largest token is checked.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", how: str) -> None:
        """`how` is what happens to rows of another tokenizer: refuse, retokenize or skip."""
        self._tokenizer, self._how = tokenizer, how
        self._is_said = False

    @cached_property
    def digest(self) -> str:
        """The digest of the policy's tokenizer."""
        return tokenizer_digest(self._tokenizer)

    def __call__(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return rows ready to be tokenized: foreign tokens are set to NULL, or their rows marked.

        Raises JobError if they are refused; it names a row and the ways out.
        """
        is_foreign = self._is_foreign(rows)
        if not is_foreign.any():
            return rows.with_columns(pl.lit(None, pl.String).alias(_FOREIGN))
        foreign = rows.filter(is_foreign)
        if self._how == "refuse":
            raise JobError(
                f"experience `{foreign['experience_id'][0]}` ({foreign.height} of {rows.height} "
                f"rows drawn) has tokens of the tokenizer `{foreign['tokenizer'][0]}`, and the "
                f"policy's is `{self.digest}`, with another vocabulary, rules or chat template; "
                "set `trainer.foreign_tokens` to `retokenize` to tokenize the text again, or to "
                "`skip` to leave such rows out, or train the model that sampled the rows"
            )
        self._say(foreign)
        why = pl.format(
            f"its tokens are of the tokenizer {{}}, the policy's is {self.digest}", "tokenizer"
        )
        if self._how == "skip":
            return rows.with_columns(pl.when(is_foreign).then(why).alias(_FOREIGN))
        has_text = pl.any_horizontal(pl.col("messages", "response_text").is_not_null())
        no_text = pl.format("{}, and it has no text", why)
        given = [name for name in _OF_TOKENS if name in rows.columns]
        absent = [pl.when(~is_foreign).then(name).alias(name) for name in given]
        return rows.with_columns(
            *absent, pl.when(is_foreign & ~has_text).then(no_text).alias(_FOREIGN)
        )

    def counted(self, rows: pl.DataFrame) -> dict[str, float]:
        """Return how many rows of a step were of another tokenizer, unless they are refused."""
        if self._how == "refuse":
            return {}
        return {"train/foreign_rows": float(self._is_foreign(rows).sum())}

    def _is_foreign(self, rows: pl.DataFrame) -> pl.Series:
        """Return which rows are known to have another tokenizer."""
        given: Any = rows["tokenizer"]
        if given.null_count() == len(given):
            return pl.repeat(False, len(given), dtype=pl.Boolean, eager=True)  # noqa: FBT003
        return (given != self.digest).fill_null(value=False)

    def _say(self, foreign: pl.DataFrame) -> None:
        if not self._is_said:  # once a job, not once a step
            self._is_said = True
            done = "tokenized again" if self._how == "retokenize" else "left out"
            _log.warning(
                "rows such as `%s` are of the tokenizer `%s`, the policy's is `%s`; they are %s",
                foreign["experience_id"][0],
                foreign["tokenizer"][0],
                self.digest,
                done,
            )


def why_foreign(rows: pl.DataFrame) -> pl.Series:
    """Return why the tokens of rows cannot be those of the policy, NULL for the others."""
    return rows[_FOREIGN]


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


def with_media(rows: pl.DataFrame, images: "Images | None") -> list[pl.Series]:
    """Return `media_ids` of rows, and `wrong_media`: why a row cannot be trained on, or NULL."""
    # Rows of text only take no look at each, which would make Python objects of all their tokens.
    # Cast, since an operator may have left NULL alone, which is a type of its own.
    if not rows["messages"].cast(pl.String).str.contains(_SHOWS, literal=True).any():
        empty = pl.Series("media_ids", [[]], pl.List(pl.String))
        return [
            empty.new_from_index(0, rows.height),
            pl.Series("wrong_media", [None], pl.String).new_from_index(0, rows.height),
        ]
    found: list[list[str]] = []
    wrong: list[str | None] = []
    for text, token_ids in rows.select("messages", "token_ids").iter_rows():
        media = _media(text)
        why = _wrong(media, token_ids, images) if media else None
        found.append([] if why else media)
        wrong.append(why)
    return [
        pl.Series("media_ids", found, pl.List(pl.String)),
        pl.Series("wrong_media", wrong, pl.String),
    ]


def _media(messages: str | None) -> list[str]:
    return media_ids(json.loads(messages)) if messages and _SHOWS in messages else []


def _wrong(media: list[str], token_ids: list[int] | None, images: "Images | None") -> str | None:
    if images is None:
        return "it shows images, and the model reads none; take a vision-language model"
    try:
        expected = images.count(media)
    except (NotFoundError, ValueError) as error:  # the latter for one too narrow for the model
        return str(error)
    # an answer may hold more of them, as text
    if token_ids is not None and token_ids.count(images.token_id) < expected:
        return f"its token_ids have fewer than the {expected} tokens that its images take"
    return None
