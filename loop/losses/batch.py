"""Convert rows to tensors: the only place where Arrow becomes torch.

`Examples` is a whole step, flat and on the CPU; `Batch` is a part of it, padded, on the device.
Both have named columns, with one value per token or one per row:

- stored: `logprobs` (the behavior policy's), `teacher_logprobs`, `token_rewards`, and with
  `model.router_replay` `routed_experts` (of each layer, [.., X], -1 if unknown); per row
  `advantage`, `reward`, `weight` (of the draw), `lag` (NaN if unknown), `is_expert` (whether an
  expert wrote the row), `group` (rows of one group have the same number), `temperature` (at which
  the row's likelihoods are computed); of pairs the stored `margin`
- computed before the update, without gradient, if the algorithm needs them: `proximal` (the
  trained policy's log-probs), `old_entropy`, `old_discriminator` (the mean of p (H + log p) over
  its vocabulary), `old_values` (the critic's), `reference` (the reference policy's log-probs),
  `teacher_logprobs` if they are not stored
- computed by `Algorithm.prepare`: any others, such as `returns` or a per-token `advantage`
- computed by the trained networks, with gradient, in a Batch only: `entropy`, `values`, `scores`,
  `vocabulary` (the result of `Algorithm.over_vocabulary`)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import torch
from torch import Tensor

from ...store.errors import JobError

STORED = {
    "logprobs": "leave such rows out with `trainer.where: logprobs IS NOT NULL`, or take those of "
    "the policy before the step with `trainer.missing_logprobs: recompute`",
    "teacher_logprobs": "name a `trainer.teacher`, or leave such rows out with `trainer.where: "
    "teacher_logprobs IS NOT NULL`",
    "reward": "leave such rows out with `trainer.where: reward IS NOT NULL`",
}
"""Stored columns that an algorithm may need, and the way out if a row has none."""
UNKNOWN = -1
"""Stands for an expert that was not recorded."""
MEASURED = frozenset(
    ["proximal", "old_entropy", "old_discriminator", "old_values", "reference", "teacher_logprobs"]
)
"""Columns that networks compute before the update."""


@dataclass(frozen=True)
class Totals:
    """The denominators of an update's losses, however it is divided into micro-batches."""

    tokens: float
    """Trained tokens; at least 1."""
    sequences: float
    units: float
    """Rows, or pairs if rows come in pairs."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch of an update: B sequences of T tokens, padded on the right.

    Position t of every column of tokens belongs to token t; padding is 0.
    """

    tokens: Mapping[str, Tensor]
    """Columns [B, T]."""
    rows: Mapping[str, Tensor]
    """Columns [B]."""
    totals: Totals
    places: tuple[int, ...] = ()
    """The position of each sequence among the rows of the update."""
    step: int = 1
    """The training step, from 1."""
    state: Mapping[str, float] = field(default_factory=dict)
    """The algorithm's state: values kept from step to step, and those that `prepare` added."""
    media: Sequence[Sequence[str]] = ()
    """The ids of the images of each sequence; empty: none shows any."""

    @property
    def token_ids_BT(self) -> Tensor:
        """Tokens; padding is any token."""
        return self.tokens["token_ids"]

    @property
    def mask_BT(self) -> Tensor:
        """1.0 where a token is trained on."""
        return self.tokens["mask"]

    @property
    def logprobs_BT(self) -> Tensor:
        """The behavior policy's log-probs."""
        return self.tokens["logprobs"]

    @property
    def weight_B(self) -> Tensor:
        """Importance weight of the draw."""
        return self.rows["weight"]

    @property
    def advantage_BT(self) -> Tensor:
        """The advantage of each trained token: its own, or its sequence's."""
        if "advantage" in self.tokens:
            return self.tokens["advantage"] * self.mask_BT
        return self.rows["advantage"][:, None] * self.mask_BT

    @property
    def lengths_B(self) -> Tensor:
        """Trained tokens of each sequence."""
        return self.mask_BT.sum(1)

    def sum_tokens(self, values_BT: Tensor) -> Tensor:
        """Sum over the trained tokens of each sequence: [B]."""
        return (values_BT * self.mask_BT).sum(1)

    def mean_tokens(self, values_BT: Tensor) -> Tensor:
        """Mean over the trained tokens of each sequence, 0 without any: [B]."""
        return self.sum_tokens(values_BT) / self.lengths_B.clamp(min=1.0)

    def token_mean(self, values_BT: Tensor) -> Tensor:
        """Sum over trained tokens here, divided by the trained tokens of the whole update."""
        return (values_BT * self.mask_BT).sum() / self.totals.tokens

    def constant(self, value: float) -> Tensor:
        """Return this batch's share of a number that holds for the whole update."""
        return self.token_mean(torch.full_like(self.mask_BT, value))

    def row_mean(self, values_B: Tensor) -> Tensor:
        """Sum over rows (or pairs) here, divided by those of the whole update."""
        return values_B.sum() / self.totals.units

    def with_tokens(self, **columns: Tensor) -> "Batch":
        """Return the same batch with more columns [B, T]."""
        return replace(self, tokens={**self.tokens, **columns})

    def with_rows(self, **columns: Tensor) -> "Batch":
        """Return the same batch with more columns [B]."""
        return replace(self, rows={**self.rows, **columns})

    def take(self, at: Tensor) -> "Batch":
        """Return some of the rows."""
        return replace(
            self,
            tokens={name: value[at] for name, value in self.tokens.items()},
            rows={name: value[at] for name, value in self.rows.items()},
            places=tuple(self.places[int(i)] for i in at),
            media=[self.media[int(i)] for i in at] if self.media else (),
        )

    def to(self, device: torch.device | str) -> "Batch":
        """Return the same batch on a device."""
        return replace(
            self,
            tokens={name: value.to(device) for name, value in self.tokens.items()},
            rows={name: value.to(device) for name, value in self.rows.items()},
        )


@dataclass(frozen=True)
class Examples:
    """The rows of one step: R sequences, concatenated, with N tokens in all."""

    experience_ids: Sequence[str]
    lengths: Tensor
    """Tokens of each sequence: int64 [R]."""
    tokens: Mapping[str, Tensor]
    """Columns [N], `token_ids` and `mask` among them."""
    rows: Mapping[str, Tensor]
    """Columns [R], `weight` among them."""
    units: Tensor
    """Rows with the same number stay together, as the two of a pair: int64 [R]."""
    step: int = 1
    state: Mapping[str, float] = field(default_factory=dict)
    """The algorithm's state: values kept from step to step, and those that `prepare` added."""
    media: Sequence[Sequence[str]] = ()
    """The ids of the images of each sequence; empty: none shows any."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens with a loss; the first token of a sequence has none, since nothing predicts it."""
        return int(self.tokens["mask"].sum())

    @property
    def totals(self) -> Totals:
        """The denominators of losses over these rows."""
        units = int(self.units.unique().numel())
        # Never 0 tokens: a batch without any has a loss of 0, not NaN.
        return Totals(float(self.num_trained_tokens) or 1.0, len(self), units)

    @property
    def row_N(self) -> Tensor:
        """The row of each token: int64 [N]."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    @property
    def starts(self) -> Tensor:
        """The offset of each sequence, and the end of the last: int64 [R + 1]."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @property
    def num_read_tokens(self) -> int:
        """Tokens before the last trained one of each sequence, which networks read."""
        place_N = torch.arange(len(self.row_N)) - self.starts[self.row_N]
        last_R = torch.zeros(len(self), dtype=torch.long)
        places_N = (place_N * self.tokens["mask"]).long()
        return int(last_R.scatter_reduce(0, self.row_N, places_N, "amax").sum())

    def sum_tokens(self, values_N: Tensor) -> Tensor:
        """Sum over the trained tokens of each sequence: [R]."""
        sums = torch.zeros(len(self), dtype=values_N.dtype)
        return sums.index_add(0, self.row_N, values_N * self.tokens["mask"].to(values_N.dtype))

    def with_tokens(self, **columns: Tensor) -> "Examples":
        """Return the same rows with more columns [N]."""
        return replace(self, tokens={**self.tokens, **columns})

    def with_rows(self, **columns: Tensor) -> "Examples":
        """Return the same rows with more columns [R]."""
        return replace(self, rows={**self.rows, **columns})

    def take(self, places: Sequence[int]) -> "Examples":
        """Return some of the rows, in the given order."""
        at = torch.tensor(list(places), dtype=torch.long)
        spots = self.spots(places)
        return replace(
            self,
            experience_ids=[self.experience_ids[i] for i in places],
            lengths=self.lengths[at],
            tokens={name: value[spots] for name, value in self.tokens.items()},
            rows={name: value[at] for name, value in self.rows.items()},
            units=self.units[at],
            media=[self.media[i] for i in places] if self.media else (),
        )

    def spots(self, places: Sequence[int]) -> Tensor:
        """Return the indices of the tokens of some rows, row by row."""
        at = torch.tensor(list(places), dtype=torch.long)
        starts, lengths = self.starts[:-1][at], self.lengths[at]
        ends = lengths.cumsum(0)
        within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(ends - lengths, lengths)
        return torch.repeat_interleave(starts, lengths) + within

    def padded(self, places: Sequence[int], *, totals: Totals, pad_id: int) -> Batch:
        """Return some of the rows as a batch; without places, one row of padding."""
        at = torch.tensor(list(places), dtype=torch.long)
        lengths = self.lengths[at]
        width = int(lengths.max()) if len(at) else 1
        filled = torch.arange(width) < (lengths[:, None] if len(at) else torch.zeros(1, 1))
        spots = self.spots(places)

        def pad(name: str, value_N: Tensor) -> Tensor:
            start = {"token_ids": pad_id, "routed_experts": UNKNOWN}.get(name, 0)
            shape = (*filled.shape, *value_N.shape[1:])
            out = torch.full(shape, start, dtype=value_N.dtype)
            out[filled] = value_N[spots]
            return out

        def pick(value_R: Tensor) -> Tensor:
            return value_R[at] if len(at) else torch.zeros(1, dtype=value_R.dtype)

        return Batch(
            {name: pad(name, value) for name, value in self.tokens.items()},
            {name: pick(value) for name, value in self.rows.items()},
            totals,
            tuple(places),
            self.step,
            self.state,
            [self.media[i] for i in places] if self.media else (),
        )


def joined(parts: Sequence[Examples]) -> Examples:
    """Concatenate parts, with the columns that all of them have."""
    # Each part numbers its units from 0.
    sizes = [int(part.units.max()) + 1 if len(part) else 0 for part in parts]
    before = np.cumsum([0, *sizes])

    media = [ids for part in parts for ids in part.media or [()] * len(part)]

    def columns(named: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        common = set(named[0]).intersection(*named)
        return {name: torch.cat([part[name] for part in named]) for name in sorted(common)}

    return replace(
        parts[0],
        experience_ids=[name for part in parts for name in part.experience_ids],
        lengths=torch.cat([part.lengths for part in parts]),
        tokens=columns([part.tokens for part in parts]),
        rows=columns([part.rows for part in parts]),
        units=torch.cat([p.units + int(b) for p, b in zip(parts, before, strict=False)]),
        media=media if any(media) else (),
    )


def examples(
    rows: pl.DataFrame,
    *,
    needs: frozenset[str] = frozenset(),
    step: int = 1,
    experts: tuple[int, int, int] | None = None,
) -> Examples:
    """Convert rows that are trained on.

    Rows with the same value of the column `unit`, if it exists, belong together. `experts` are the
    numbers of layers, of experts for a token and of all experts that the rows were routed by; None:
    experts are not replayed. Raises JobError if a row lacks a column that is needed, or has another
    number of experts; it names the row.
    """
    _check(rows, needs)
    lengths = torch.tensor(rows["token_ids"].list.len().to_numpy().astype(np.int64))
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1]
    mask = _flat(rows, "loss_mask", np.float32)
    mask[starts] = 0.0  # nothing predicts the first token of a sequence
    tokens = {"token_ids": _flat(rows, "token_ids", np.int64), "mask": mask}
    for name in ("logprobs", "teacher_logprobs", "token_rewards"):
        # Only if all rows have it: a batch has one set of columns. `_check` has refused rows that
        # lack one which the algorithm needs.
        if name in rows.columns and rows.height and rows[name].null_count() == 0:
            tokens[name] = _flat(rows, name, np.float32)
    if experts is not None:
        tokens["routed_experts"] = _routed(rows, *experts)
    unit = rows["unit"] if "unit" in rows.columns else pl.int_range(rows.height, eager=True)
    return Examples(
        rows["experience_id"].to_list(),
        lengths,
        tokens,
        {name: _numbers(rows, name) for name in _ROWS if name in rows.columns},
        torch.tensor(unit.to_numpy().astype(np.int64)),
        step,
        media=rows["media_ids"].to_list() if "media_ids" in rows.columns else (),
    )


def without_missing_logprobs(rows: pl.DataFrame) -> pl.DataFrame:
    """Replace missing log-probs with NaN, one per token, for `Updater` to compute."""
    unknown = pl.col("token_ids").list.eval(pl.element().cast(pl.Float32) * float("nan"))
    return rows.with_columns(logprobs=pl.coalesce("logprobs", unknown))


def experts_to_imitate(rows: pl.DataFrame) -> pl.DataFrame:
    """Set missing advantages and log-probs of an expert's rows to 0, and their temperature to 1.

    The expert is imitated, so only the policy's own likelihood counts, by its own routing.
    """
    is_expert = pl.col("is_expert")
    zeros = pl.lit(0.0, pl.Float32).repeat_by(pl.col("token_ids").list.len())
    return rows.with_columns(
        pl.when(is_expert).then(pl.col("advantage").fill_null(0.0)).otherwise("advantage"),
        pl.when(is_expert).then(pl.coalesce("logprobs", zeros)).otherwise("logprobs"),
        pl.when(is_expert).then(1.0).otherwise("temperature").alias("temperature"),
        *_unrouted(rows),
    )


def _unrouted(rows: pl.DataFrame) -> list[pl.Expr]:
    """Return an expert's `routed_experts`, where they are read, with none for each token."""
    if "routed_experts" not in rows.columns:
        return []
    none = pl.lit([], rows.schema["routed_experts"].inner).repeat_by(pl.col("token_ids").list.len())  # type: ignore[attr-defined]
    routed = pl.col("routed_experts")
    return [pl.when("is_expert").then(pl.coalesce(routed, none)).otherwise(routed)]


def at_temperature(
    rows: pl.DataFrame, *, run_id: str, run_temperature: float, likelihoods: float | None
) -> pl.DataFrame:
    """Set `temperature` to the one at which each row's likelihoods are computed.

    It is `likelihoods` if the algorithm fixes one; else the one at which the row was sampled, so
    that both log-probs are of the same distribution. A row without a temperature has the run's own
    if the run sampled it, else 1. Greedy rows (0) have log-probs at 1.
    """
    is_own = (pl.col("run_id") == run_id).fill_null(value=False)
    unknown = pl.when(is_own).then(run_temperature).otherwise(1.0)
    sampled = pl.col("temperature").fill_null(unknown)
    made = pl.when(sampled > 0).then(sampled).otherwise(1.0)
    return rows.with_columns(temperature=made if likelihoods is None else pl.lit(likelihoods))


_ROWS = ("weight", "advantage", "reward", "lag", "is_expert", "group", "margin", "temperature")


def _check(rows: pl.DataFrame, needs: frozenset[str]) -> None:
    if rows["loss_mask"].null_count():
        name = rows.filter(pl.col("loss_mask").is_null())["experience_id"][0]
        raise JobError(f"experience `{name}` has token_ids but no loss_mask; import it with one")
    for column, way_out in STORED.items():
        if column in needs and rows[column].null_count():
            name = rows.filter(pl.col(column).is_null())["experience_id"][0]
            raise JobError(
                f"experience `{name}` has no {column}, and this algorithm needs them; {way_out}"
            )


def _flat(rows: pl.DataFrame, name: str, dtype: type) -> Tensor:
    # An empty list would otherwise become a NULL, and shift all values of the rows after it.
    values = rows[name].explode(empty_as_null=False)
    if len(values) != int(rows["token_ids"].list.len().sum()):
        wrong = rows.filter(pl.col(name).list.len() != pl.col("token_ids").list.len())
        raise JobError(
            f"experience `{wrong['experience_id'][0]}` has {name} that are not aligned with its "
            "token_ids; expected one per token"
        )
    return torch.from_numpy(values.fill_null(0).to_numpy().astype(dtype))


def _routed(rows: pl.DataFrame, num_layers: int, top_k: int, num_experts: int) -> Tensor:
    """Return the experts of each token [N, X], and `UNKNOWN` for a token without any."""
    routed, length = pl.col("routed_experts"), pl.col("token_ids").list.len()
    lacking = rows.filter(routed.is_null())["experience_id"]
    if len(lacking):
        raise JobError(
            f"experience `{lacking[0]}` and {len(lacking) - 1} more of the step have no "
            "routed_experts, which `model.router_replay` replays; sample them with "
            "`explorer.engine: {transformers: {}}` and router_replay, or leave such rows out with "
            "`trainer.where: routed_experts IS NOT NULL`"
        )
    # a list for each token, which is empty for the last one
    each = rows["routed_experts"].explode(empty_as_null=False)
    sizes, width = each.list.len(), num_layers * top_k
    flat = each.explode(empty_as_null=False)
    wrong = rows.filter(
        (routed.list.len() != length)
        | routed.list.eval(~pl.element().list.len().is_in([0, width])).list.any()
        | routed.list.eval(pl.element().list.max() >= num_experts).list.any()
    )
    if wrong.height:
        first = wrong.row(0, named=True)
        most = max(map(len, first["routed_experts"]), default=0)
        raise JobError(
            f"experience `{first['experience_id']}` has routed_experts of another model: up to "
            f"{most} for a token, and the model chooses {top_k} of {num_experts} experts in each "
            f"of {num_layers} layers; leave out what other models sampled, by `trainer.where`"
        )
    found_NX = np.full((len(each), width), UNKNOWN, np.int32)
    found_NX[sizes.to_numpy() == width] = flat.to_numpy().reshape(-1, width)
    return torch.from_numpy(found_NX)


def _numbers(rows: pl.DataFrame, name: str) -> Tensor:
    # NaN where 0 would be a value: an unknown lag is not fresh, a missing reward is not bad.
    absent = {"lag": np.nan, "reward": np.nan, "margin": np.nan, "temperature": 1.0}
    values = rows[name].cast(pl.Float64).fill_null(absent.get(name, 0.0))
    return torch.tensor(values.to_numpy(), dtype=torch.float32)


def untrainable(rows: pl.DataFrame, *, vocabulary: int | None, max_length: int | None) -> pl.Series:
    """Return why a model cannot be trained on each row, NULL if it can.

    It can if the row has at most `max_length` tokens of its vocabulary and a loss_mask of the same
    length; None: no limit.
    """
    tokens, mask = pl.col("token_ids"), pl.col("loss_mask")
    length, last = tokens.list.len(), tokens.list.max()
    ok = (length == mask.list.len()) & ~mask.list.contains(None)
    long = length > (max_length if max_length is not None else pl.lit(None))
    unknown = last >= (vocabulary if vocabulary is not None else pl.lit(None))
    # Comparisons with NULL are NULL, which `when` takes for false, so they are filled before `~`.
    why = (
        pl.when(~(length > 0).fill_null(value=False))
        .then(pl.lit("it has no tokens"))
        .when(~ok.fill_null(value=False))
        .then(pl.lit("its loss_mask does not have one value per token"))
        .when(tokens.list.contains(None) | (tokens.list.min() < 0))
        .then(pl.lit("one of its token_ids is NULL or below 0"))
        .when(long)
        .then(
            pl.format(
                f"its {{}} tokens are more than the {max_length} that the model accepts", length
            )
        )
        .when(unknown)
        .then(pl.format(f"it has token {{}}, and the model has only {vocabulary}", last))
    )
    return rows.select(why=why.otherwise(pl.lit(None, pl.String)))["why"]
