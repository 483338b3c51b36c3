"""Rows become tensors: micro-batches by token budget. The only place where Arrow becomes torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import polars as pl
import torch
from torch import Tensor

from ..store.errors import JobError


@dataclass(frozen=True)
class Batch:
    """Rows of one optimizer step, or some of them: B sequences of T tokens, padded on the right.

    Position t of every tensor belongs to token t. The totals are those of the whole step, so that
    the losses of its micro-batches add up to the step's loss, however it was cut.
    """

    token_ids_BT: Tensor
    mask_BT: Tensor
    """1.0 where a token is trained on."""
    logprobs_BT: Tensor
    """The behaviour policy's; 0 where the mask is 0, or where the row has none."""
    advantage_B: Tensor
    weight_B: Tensor
    """Importance weight of the draw."""
    total_tokens: float
    """Trained tokens of the whole step."""
    total_sequences: int
    """Sequences of the whole step."""
    places: tuple[int, ...] = ()
    """Where each sequence stands among the rows of the whole step."""

    @property
    def advantage_BT(self) -> Tensor:
        """Each sequence's advantage at each of its trained tokens."""
        return self.advantage_B[:, None] * self.mask_BT

    def to(self, device: torch.device | str) -> "Batch":
        """Return the same batch on a device."""
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self)[:5]}
        return replace(self, **moved)

    def token_mean(self, values_BT: Tensor) -> Tensor:
        """Sum over trained tokens here, divided by the trained tokens of the whole step."""
        return (values_BT * self.mask_BT).sum() / self.total_tokens


@dataclass(frozen=True)
class Examples:
    """The rows of one step as plain lists, checked: what a step is made of, before padding."""

    experience_ids: list[str]
    token_ids: list[list[int]]
    masks: list[list[bool]]
    logprobs: list[list[float]] | None
    advantages: list[float]
    weights: list[float]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens with a loss; the first of a sequence has none, since nothing predicts it."""
        return sum(sum(mask[1:]) for mask in self.masks)


def examples(rows: pl.DataFrame, *, needs_logprobs: bool) -> Examples:
    """Take the columns of the rows that are trained on.

    Raises JobError when a row misses what the algorithm needs, naming the row.
    """
    ids = rows["experience_id"].to_list()
    masks = rows["loss_mask"].to_list()
    logprobs = rows["logprobs"].to_list()
    for i, name in enumerate(ids):
        if masks[i] is None:
            raise JobError(
                f"experience `{name}` has token_ids but no loss_mask; import it with one"
            )
        if needs_logprobs and logprobs[i] is None:
            raise JobError(
                f"experience `{name}` has no logprobs, and this algorithm weighs rows by them; "
                "leave such rows out with `trainer.where: logprobs IS NOT NULL`"
            )
    return Examples(
        ids,
        rows["token_ids"].to_list(),
        masks,
        logprobs if needs_logprobs else None,
        rows["advantage"].fill_null(0.0).to_list(),
        rows["weight"].to_list(),
    )


def trainable(rows: pl.DataFrame, *, vocabulary: int | None, max_length: int | None) -> pl.Series:
    """Tell which rows a model can be trained on; the others must not reach `examples`.

    Those have tokens of its vocabulary, at most `max_length` of them, and a loss_mask as long. None
    sets no limit.
    """
    tokens, mask = pl.col("token_ids"), pl.col("loss_mask")
    good = (tokens.list.len() > 0) & (tokens.list.len() == mask.list.len())
    good &= (tokens.list.min() >= 0) & ~tokens.list.contains(None) & ~mask.list.contains(None)
    if max_length is not None:
        good &= tokens.list.len() <= max_length
    if vocabulary is not None:
        good &= tokens.list.max() < vocabulary
    return rows.select(trainable=good.fill_null(value=False))["trainable"]


def micro_batches(
    rows: Examples, *, max_tokens: int, pad_id: int, device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """Cut a step into batches of at most `max_tokens` tokens, padding included, longest rows first.

    A single row longer than that is a batch of its own.
    """
    total_tokens = float(rows.num_trained_tokens) or 1.0
    for places in plan([len(t) for t in rows.token_ids], max_tokens):
        yield _pad(rows, places, total_tokens, pad_id).to(device)


def plan(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group places of rows of similar length so that each padded group keeps within the budget.

    >>> plan([2, 9, 3, 8], 18)
    [[1, 3], [2, 0]]
    """
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and longest * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def _pad(rows: Examples, places: Sequence[int], total_tokens: float, pad_id: int) -> "Batch":
    size = (len(places), max(len(rows.token_ids[i]) for i in places))
    tokens_BT = torch.full(size, pad_id, dtype=torch.long)
    mask_BT = torch.zeros(size)
    logprobs_BT = torch.zeros(size)
    for b, i in enumerate(places):
        length = len(rows.token_ids[i])
        tokens_BT[b, :length] = torch.tensor(rows.token_ids[i])
        mask_BT[b, :length] = torch.tensor(rows.masks[i], dtype=torch.float)
        if rows.logprobs is not None:
            logprobs_BT[b, :length] = torch.tensor(rows.logprobs[i])
    mask_BT[:, 0] = 0.0
    return Batch(
        tokens_BT,
        mask_BT,
        logprobs_BT,
        torch.tensor([rows.advantages[i] for i in places], dtype=torch.float),
        torch.tensor([rows.weights[i] for i in places], dtype=torch.float),
        total_tokens,
        len(rows),
        tuple(places),
    )
