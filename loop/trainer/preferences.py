"""Preference pairs as rows of a training step, and which of them can be trained on."""

import polars as pl

from ...store.errors import ConfigError
from ..algorithms import Algorithm
from ..config import RunConfig


def check(config: RunConfig, algorithm: Algorithm) -> None:
    """Raise ConfigError for settings that do not fit an algorithm that draws pairs."""
    if algorithm.unit != "pair":
        return
    name = config.algorithm if isinstance(config.algorithm, str) else next(iter(config.algorithm))
    if config.explorer is not None:
        raise ConfigError(
            f"`{name}` learns from stored preferences, which an explorer does not create; explore "
            "with `rlake explore`, pair its rollouts with the operator `pairs`, then train without "
            "an `explorer` section"
        )
    if config.trainer.priority_update is not None:
        raise ConfigError(
            f"`trainer.priority_update` is for rows, and `{name}` draws pairs; set a priority over "
            "columns of `preferences`, such as `margin`"
        )


def places(rows: pl.DataFrame) -> pl.Expr:
    """Return the pair of each row, from 0: rows come as chosen, rejected, chosen, rejected ..."""
    return pl.int_range(rows.height) // 2


def whole(rows: pl.DataFrame, usable: pl.Series) -> pl.Series:
    """Return which rows belong to pairs of two different rows that can both be trained on.

    Neither row may be dropped, and each needs a token that is trained on.
    """
    # The first token does not count: nothing predicts it.
    trained = pl.col("loss_mask").list.slice(1).list.any().fill_null(value=False)
    judged = rows.select("experience_id", pair=places(rows), good=trained).with_columns(
        good=usable & rows["drop_reason"].is_null() & pl.col("good")
    )
    differ = pl.col("experience_id").n_unique().over("pair") == 2
    return judged.select(whole=pl.col("good").all().over("pair") & differ)["whole"]
