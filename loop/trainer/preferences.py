"""Preferences as rows of a training step: which pairs can be trained on, and how to get some."""

import polars as pl

from ...store.errors import ConfigError
from ..algorithms import Algorithm
from ..config import RunConfig


def check(config: RunConfig, algorithm: Algorithm) -> None:
    """Raise ConfigError for what does not go together with an algorithm of pairs."""
    if algorithm.unit != "pair":
        return
    name = config.algorithm if isinstance(config.algorithm, str) else next(iter(config.algorithm))
    if config.explorer is not None:
        raise ConfigError(
            f"`{name}` learns from stored preferences, and an explorer makes none; explore with "
            "`rlake explore`, make pairs of the tries with the operator `pairs`, then train "
            "without an `explorer` section"
        )
    if config.trainer.priority_update is not None:
        raise ConfigError(
            f"`trainer.priority_update` is of rows, and `{name}` draws pairs; give them a priority "
            "over columns of `preferences`, such as `margin`"
        )


def places(rows: pl.DataFrame) -> pl.Expr:
    """Return the pair of each row, from 0: rows come as chosen, rejected, chosen, rejected ..."""
    return pl.int_range(rows.height) // 2


def whole(rows: pl.DataFrame, usable: pl.Series) -> pl.Series:
    """Tell which rows are of pairs both of whose rows can be trained on, and are not the same.

    Each must be there, not be dropped, and have a token that is trained on.
    """
    trained = pl.col("loss_mask").list.slice(1).list.any().fill_null(value=False)
    judged = rows.select("experience_id", pair=places(rows), good=trained).with_columns(
        good=usable & rows["drop_reason"].is_null() & pl.col("good")
    )
    differ = pl.col("experience_id").n_unique().over("pair") == 2
    return judged.select(whole=pl.col("good").all().over("pair") & differ)["whole"]
