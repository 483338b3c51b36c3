"""Sums over the sampled tokens of rows, in float64, a bounded number of rows at a time."""

import numpy as np
import polars as pl

from ...operators.token_statistics import sampled
from ...store import Store
from ...store.query import quoted

_BATCH_ROWS = 4096


def token_sums(store: Store, rows: pl.DataFrame, column: str = "logprobs") -> pl.DataFrame:
    """Return, of each row in its order, sums of a column of log-probs over its sampled tokens.

    `tokens` is their number, `logprob` their sum, and `doubt` that of 1 - p, which is at least a
    part of 1/√2 of the gradient's norm of each token's logits; NULL for rows without such a token.
    """
    reader = store.sql(
        f"SELECT e.experience_id, {quoted(column)} AS logprobs, loss_mask FROM experiences e "
        f"JOIN chosen USING (experience_id) WHERE {quoted(column)} IS NOT NULL AND "
        "loss_mask IS NOT NULL",
        chosen=rows.select("experience_id").unique(),
    ).to_arrow_reader(_BATCH_ROWS)
    sums = ("tokens", "logprob", "doubt")
    made = [
        pl.DataFrame(schema={"experience_id": pl.String(), **dict.fromkeys(sums, pl.Float64())})
    ]
    for batch in reader:
        places, values = sampled(batch.column("logprobs"), batch.column("loss_mask"))
        size = batch.num_rows
        # in float64: the sum of thousands of float32 log-probs is exponentiated
        found = {
            "tokens": np.bincount(places, minlength=size).astype(np.float64),
            "logprob": np.bincount(places, values, minlength=size),
            # not 1 - exp: it loses the digits of tokens that are almost certain
            "doubt": np.bincount(places, -np.expm1(values), minlength=size),
        }
        ids = pl.Series(pl.from_arrow(batch.column("experience_id"))).cast(pl.String)
        made.append(pl.DataFrame({"experience_id": ids, **found}).filter(pl.col("tokens") > 0))
    joined = rows.select("experience_id").join(
        pl.concat(made), on="experience_id", how="left", maintain_order="left"
    )
    return joined.with_columns(pl.col("logprob", "doubt").fill_nan(None))
