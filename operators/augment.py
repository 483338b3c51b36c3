"""Augmentation: new rows made from old ones, which stay as they are."""

import polars as pl

from .body import FrameFunction
from .decorator import operator


@operator("augment", reads=("experience_id", "group_id", "reward"), reads_rest=True)
def best_of_group(*, min_reward: float | None = None) -> FrameFunction:
    """Add a copy of each group's best row, as `synthetic` experience to imitate.

    The copy names the best row as its parent, keeps its tokens and reward, and is a group of its
    own and of no run, so that no stored group's statistics and no run's own rows change. Rows that
    are `synthetic` themselves are not copied. Groups without a reward (or, with `min_reward`,
    without one that high) give none; of equal rewards the first id is taken.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "group_id": "g", "reward": [0.0, 1.0],
    ...                      "source": "explorer"})
    >>> rows.pipe(best_of_group()).select("parent_id", "reward", "source").row(2)
    ('b', 1.0, 'synthetic')
    """

    def best(frame: pl.LazyFrame) -> pl.LazyFrame:
        names = frame.collect_schema().names()
        good = pl.col("reward").is_not_null()
        if "source" in names:
            good &= pl.col("source") != "synthetic"
        if min_reward is not None:
            good &= pl.col("reward") >= min_reward
        order = ["group_id", "reward", "experience_id"]
        first = frame.filter(good).sort(order, descending=[False, True, False])
        copies = first.unique("group_id", keep="first", maintain_order=True)
        own = [pl.lit(None, pl.String).alias(n) for n in ("experience_id", "group_id")]
        copies = copies.with_columns(pl.col("experience_id").alias("parent_id")).with_columns(own)
        changes = {
            "source": pl.lit("synthetic"),
            "rollout": pl.lit(0, pl.Int64),
            "created_at": pl.lit(None),
        }
        return copies.with_columns(**{n: e for n, e in changes.items() if n in names})

    return best
