"""Rows with tokens of another tokenizer than the policy's: refused, retokenized, or skipped."""

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any

import polars as pl

from ...store.errors import JobError
from ...store.schema import PER_TOKEN
from ..models.load import tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FOREIGN = "why_foreign"
"""Column that says why a row's tokens cannot be those of the policy."""
_OF_TOKENS = ("token_ids", *PER_TOKEN)
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
