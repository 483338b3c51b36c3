"""Rows whose tokens are of another tokenizer than the policy's: refused, made anew, or left out."""

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any

import polars as pl

from ...store.errors import JobError
from ..models.load import tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FOREIGN = "why_foreign"
"""Column that says why a row's tokens cannot be those of the policy."""
_OF_TOKENS = ("token_ids", "loss_mask", "logprobs", "teacher_logprobs", "token_rewards")
_log = logging.getLogger(__name__)


class TokenCheck:
    """Compares the tokenizer of rows with the policy's.

    Rows whose `tokenizer` is NULL, as those that were imported with token ids, are taken as the
    policy's: of them only the largest token is checked.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", how: str) -> None:
        """How: what is done with rows of others: refuse, retokenize or skip."""
        self._tokenizer, self._how = tokenizer, how
        self._is_said = False

    @cached_property
    def digest(self) -> str:
        """The digest of the policy's tokenizer."""
        return tokenizer_digest(self._tokenizer)

    def __call__(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return rows ready to be tokenised: tokens of others are refused, or NULL, or marked.

        Raises JobError where they are refused, naming a row and the way out.
        """
        is_foreign = self._is_foreign(rows)
        if not is_foreign.any():
            return rows.with_columns(pl.lit(None, pl.String).alias(_FOREIGN))
        foreign = rows.filter(is_foreign)
        if self._how == "refuse":
            raise JobError(
                f"experience `{foreign['experience_id'][0]}` ({foreign.height} of {rows.height} "
                f"rows drawn) has tokens of the tokenizer `{foreign['tokenizer'][0]}`, and the "
                f"policy's is `{self.digest}`: its vocabulary, rules or chat template are others; "
                "set `trainer.foreign_tokens` to `retokenize` to make tokens of the text, or to "
                "`skip` to leave such rows out, or train the model that the rows were made for"
            )
        self._say(foreign)
        why = pl.format(
            f"its tokens are of the tokenizer {{}}, the policy's is {self.digest}", "tokenizer"
        )
        if self._how == "skip":
            return rows.with_columns(pl.when(is_foreign).then(why).alias(_FOREIGN))
        has_text = pl.any_horizontal(pl.col("messages", "response_text").is_not_null())
        no_text = pl.format("{}, and it has no text", why)
        absent = [pl.when(~is_foreign).then(name).alias(name) for name in self._columns(rows)]
        return rows.with_columns(
            *absent, pl.when(is_foreign & ~has_text).then(no_text).alias(_FOREIGN)
        )

    def _columns(self, rows: pl.DataFrame) -> list[str]:
        return [name for name in _OF_TOKENS if name in rows.columns]

    def counted(self, rows: pl.DataFrame) -> dict[str, float]:
        """Return how many rows of a step were of another tokenizer, unless they are refused."""
        if self._how == "refuse":
            return {}
        return {"train/foreign_rows": float(self._is_foreign(rows).sum())}

    def _is_foreign(self, rows: pl.DataFrame) -> pl.Series:
        """Tell which rows are known to be of another tokenizer."""
        given: Any = rows["tokenizer"]
        if given.null_count() == len(given):
            return pl.repeat(False, len(given), dtype=pl.Boolean, eager=True)  # noqa: FBT003
        return (given != self.digest).fill_null(value=False)

    def _say(self, foreign: pl.DataFrame) -> None:
        if not self._is_said:
            self._is_said = True
            done = "made anew of their text" if self._how == "retokenize" else "left out"
            _log.warning(
                "rows such as `%s` are of the tokenizer `%s`, the policy's is `%s`; they are %s",
                foreign["experience_id"][0],
                foreign["tokenizer"][0],
                self.digest,
                done,
            )


def why_foreign(rows: pl.DataFrame) -> pl.Series:
    """Say why the tokens of rows cannot be those of the policy, NULL of the others."""
    return rows[_FOREIGN]
