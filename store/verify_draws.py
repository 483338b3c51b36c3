"""Verify what was trained on: read the rows of a step again, and compare their digests."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from .errors import FAILURES, NotFoundError, nearest, reason
from .ids import combine, row_digests
from .query import is_in, literal
from .store import Store

_log = logging.getLogger(__name__)

FACTS = (
    "token_ids",
    "loss_mask",
    "logprobs",
    "temperature",
    "reward",
    "messages",
    "prompt_text",
    "response_text",
)
"""Columns of an experience that a training step depends on; digests in `draws` cover these."""
ABSENT = ""
"""The digest of a row that was missing when it was drawn, as one of a pair may be."""


@dataclass(frozen=True)
class Verdict:
    """Whether the rows of a step are unchanged since they were drawn."""

    run_id: str
    step: int
    num_rows: int
    digest: str
    """Digest of the step's current rows, in the order in which they were drawn."""
    recorded: str | None
    """The digest stored with the draw; NULL in rows of older versions of rlake."""
    changed: list[str]
    """Experiences whose content has changed."""
    missing: list[str]
    """Experiences that are no longer stored."""
    unreadable: list[str]
    """Experiences whose files are damaged."""

    def __str__(self) -> str:
        what = f"step {self.step} of `{self.run_id}`: {self.num_rows} rows, batch {self.digest}"
        if self.holds:
            return f"{what}: unchanged"
        message = {"changed": self.changed, "missing": self.missing, "unreadable": self.unreadable}
        wrong = [f"`{i}` {how}" for how, ids in message.items() for i in ids]
        wrong = wrong or [f"its digest was {self.recorded}"]
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        return f"{what}: NOT what was trained on: {', '.join(wrong[:5])}{more}"

    @property
    def holds(self) -> bool:
        """Whether all rows exist, unchanged, in the order in which they were drawn."""
        if self.changed or self.missing or self.unreadable:
            return False
        return self.recorded in (None, self.digest)


def verify(store: Store, run_id: str, step: int) -> Verdict:
    """Read the rows of a training step again, and compare them with the digests in `draws`.

    Raises NotFoundError when the run has no such step.
    """
    drawn = store.sql(
        "SELECT experience_id, digest, batch_digest FROM draws_current "
        f"WHERE run_id = {literal(run_id)} AND step = {step} ORDER BY position"
    ).pl()
    if not drawn.height:
        known = steps_of(store, run_id)
        raise NotFoundError(
            f"run `{run_id}` has no step {step} on record; it has {len(known)}, "
            f"{known[0]} to {known[-1]}"
        )
    # A row drawn often is read and digested once.
    now, unreadable = _digests(store, sorted(set(drawn["experience_id"])))
    rows = drawn.with_columns(
        now=pl.col("experience_id").replace_strict(
            list(now), list(now.values()), default=None, return_dtype=pl.String
        )
    )
    gone = rows["now"].is_null() & (rows["digest"] != ABSENT)
    other = (rows["now"] != rows["digest"]).fill_null(value=False)
    absent = rows.filter(gone)["experience_id"].unique(maintain_order=True).to_list()
    return Verdict(
        run_id,
        step,
        drawn.height,
        combine(rows["now"].fill_null(ABSENT)),
        drawn["batch_digest"][0],
        rows.filter(other)["experience_id"].unique(maintain_order=True).to_list(),
        [i for i in absent if i not in unreadable],
        [i for i in absent if i in unreadable],
    )


def steps_of(store: Store, run_id: str) -> list[int]:
    """Return the steps of a run that count; raises NotFoundError when it has none."""
    found = store.sql(
        f"SELECT DISTINCT step FROM draws_current WHERE run_id = {literal(run_id)} ORDER BY step"
    ).fetchall()
    if not found:
        runs = [name for (name,) in store.sql("SELECT DISTINCT run_id FROM draws").fetchall()]
        raise NotFoundError(f"there are no draws of a run `{run_id}`{nearest(run_id, runs)}")
    return [step for (step,) in found]


def _digests(store: Store, ids: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Return the digest of each stored experience, and the ids that cannot be read.

    When a read fails, halves are read, down to the damaged row.
    """
    try:
        rows = store.dataset("experiences").to_table(
            columns=["experience_id", *FACTS], filter=is_in("experience_id", ids)
        )
        names = rows.column("experience_id").to_pylist()
        return dict(zip(names, row_digests(rows.select(FACTS)), strict=True)), set()
    except FAILURES as error:  # of a damaged file
        if len(ids) == 1:
            _log.warning("`%s` cannot be read: %s", ids[0], reason(error))
            return {}, set(ids)
    # one damaged page makes a whole read fail, and every other row can still be proved
    half = len(ids) // 2
    first, second = _digests(store, ids[:half]), _digests(store, ids[half:])
    return first[0] | second[0], first[1] | second[1]
