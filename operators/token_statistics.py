"""What the stored log-probs say of an answer, token by token."""

from collections.abc import Mapping

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from .body import Batches, on_all_rows
from .decorator import operator

_NAMES = ("surprise", "surprise_max", "perplexity")
_COLUMNS: dict[str, type[pl.DataType]] = dict.fromkeys(_NAMES, pl.Float64)


@operator("derive", reads=("logprobs", "loss_mask"), writes=tuple(_COLUMNS))
def surprise() -> Batches:
    """Set `surprise`, `surprise_max` and `perplexity` from the log-probs of the sampled tokens.

    `surprise` is the mean of -log p over the tokens that the policy sampled (those in `loss_mask`),
    in nats a token; `surprise_max` that of the least expected token; `perplexity` exp(surprise).
    The log-probs are the behavior policy's, as sampled. On average over answers sampled at
    temperature 1 from the whole vocabulary, `surprise` is the policy's entropy a token; of one
    answer it is not its entropy, which needs the probabilities of all tokens, and these are not
    stored. NULL where there are no such tokens, or a log-prob of one is not finite.

    >>> rows = pl.DataFrame({"experience_id": ["a"], "logprobs": [[0.0, -1.0, -3.0]],
    ...                      "loss_mask": [[False, True, True]]})
    >>> rows.pipe(surprise()).select("surprise", "surprise_max").row(0)
    (2.0, 3.0)
    """

    def measure(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows, values = sampled(batch["logprobs"], batch["loss_mask"])
        n = batch.num_rows
        count = np.bincount(rows, minlength=n)
        with np.errstate(all="ignore"):  # what is not finite becomes NULL below
            mean = -np.bincount(rows, values, minlength=n) / count
            top = np.full(n, -np.inf)
            np.maximum.at(top, rows, -values)
            made = {"surprise": mean, "surprise_max": top, "perplexity": np.exp(mean)}
        whole = (count > 0) & np.isfinite(mean)
        return _batch({k: np.where(whole & np.isfinite(v), v, np.nan) for k, v in made.items()})

    return Batches(measure, columns=_COLUMNS)


def answer_logprobs(frame: pl.LazyFrame, *, into: str) -> pl.LazyFrame:
    """Add the log-prob of each row's whole answer, in nats; NULL where it is not known."""

    def add(rows: pl.DataFrame) -> pl.DataFrame:
        columns = (rows[name].to_arrow() for name in ("logprobs", "loss_mask"))
        places, values = sampled(*columns)
        count = np.bincount(places, minlength=rows.height)
        total = np.bincount(places, values, minlength=rows.height)
        known = (count > 0) & np.isfinite(total)
        return rows.with_columns(pl.Series(into, np.where(known, total, np.nan)).fill_nan(None))

    return on_all_rows(add, {into: pl.Float64})(frame)


def sampled(logprobs: pa.Array, loss_mask: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probs of all sampled tokens, row after row, and the row of each.

    Raises ValueError when a row has another number of log-probs than of places in its mask.
    """
    both = pc.and_(logprobs.is_valid(), loss_mask.is_valid())
    places = np.flatnonzero(both.to_numpy(zero_copy_only=False))
    kept, mask = logprobs.filter(both), loss_mask.filter(both)
    lengths, wanted = (pc.list_value_length(x).to_numpy() for x in (kept, mask))
    if (lengths != wanted).any():
        first = int(np.flatnonzero(lengths != wanted)[0])
        raise ValueError(
            f"`logprobs` has {lengths[first]} values and `loss_mask` {wanted[first]}, expected one "
            "a token"
        )
    is_sampled = pc.fill_null(mask.flatten(), False).to_numpy(zero_copy_only=False)  # noqa: FBT003
    values = kept.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    return np.repeat(places, lengths)[is_sampled], values[is_sampled]


def _batch(columns: Mapping[str, np.ndarray]) -> pa.RecordBatch:
    return pa.record_batch({k: pa.array(v, from_pandas=True) for k, v in columns.items()})
