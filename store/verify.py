"""Proof of what was trained on: the rows of a step are read again, and their digests compared."""

from dataclasses import dataclass

import polars as pl

from .errors import NotFoundError
from .ids import combine, row_digests
from .query import literal
from .store import Store

FACTS = (
    "token_ids",
    "loss_mask",
    "logprobs",
    "reward",
    "messages",
    "prompt_text",
    "response_text",
)
"""What a training step reads of an experience and depends on: digests in `draws` are over these."""


@dataclass(frozen=True)
class Verdict:
    """Whether the rows of a step are what they were when it was taken."""

    run_id: str
    step: int
    num_rows: int
    digest: str
    """Of the whole batch, in order, as it is stored now."""
    changed: list[str]
    """Experiences whose stored content is not what was trained on."""
    missing: list[str]
    """Experiences that are not in the store any more."""

    def __str__(self) -> str:
        what = f"step {self.step} of `{self.run_id}`: {self.num_rows} rows, batch {self.digest}"
        if self.holds:
            return f"{what}: unchanged"
        wrong = [f"`{i}` changed" for i in self.changed] + [f"`{i}` missing" for i in self.missing]
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        return f"{what}: NOT what was trained on: {', '.join(wrong[:5])}{more}"

    @property
    def holds(self) -> bool:
        """Whether all rows are there, unchanged."""
        return not self.changed and not self.missing


def verify(store: Store, run_id: str, step: int) -> Verdict:
    """Read the rows of a training step again, and compare them with the digests in `draws`.

    Raises NotFoundError when the run has no such step.
    """
    drawn = store.sql(
        "SELECT experience_id, digest FROM draws_current "
        f"WHERE run_id = {literal(run_id)} AND step = {step} ORDER BY position"
    ).pl()
    if not drawn.height:
        raise NotFoundError(f"run `{run_id}` has no step {step} on record; see `steps`")
    ids = ", ".join(literal(i) for i in drawn["experience_id"])
    stored = store.dataset("experiences").to_table(
        columns=["experience_id", *FACTS], filter=f"experience_id IN ({ids})"
    )
    now = pl.DataFrame(
        {
            "experience_id": stored.column("experience_id").to_pylist(),
            "now": row_digests(stored.select(FACTS)),
        },
        schema={"experience_id": pl.String, "now": pl.String},
    )
    both = drawn.join(now, on="experience_id", how="left", maintain_order="left")
    gone = both["now"].is_null()
    other = (both["now"] != both["digest"]).fill_null(value=False)
    return Verdict(
        run_id,
        step,
        drawn.height,
        combine(both["now"].fill_null("")),
        both.filter(other)["experience_id"].to_list(),
        both.filter(gone)["experience_id"].to_list(),
    )
