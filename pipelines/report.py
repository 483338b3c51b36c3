"""Report: what one run of a pipeline did."""

from dataclasses import dataclass, field

import polars as pl


@dataclass(frozen=True)
class Dropped:
    """How many rows an operator dropped for one reason."""

    operator: str
    reason: str
    rows: int

    @classmethod
    def counted(cls, drops: pl.DataFrame) -> "tuple[Dropped, ...]":
        """Count the rows of `drops` by operator and reason, in the order of the operators."""
        if not drops.height:
            return ()
        counts = drops.group_by("operator", "reason", maintain_order=True).len()
        return tuple(cls(o, r, n) for o, r, n in counts.rows())


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one run of a pipeline did; the same is in `lineage` and `drops` under `lineage_id`."""

    pipeline: str
    lineage_id: str
    rows_in: int
    rows_out: int
    """Rows written; without a sink, rows returned."""
    already: int
    """Rows that the sink had already."""
    dropped: tuple[Dropped, ...]
    seconds: float
    rows: pl.DataFrame | None = field(default=None, repr=False)
    """The rows themselves, when there is no sink."""

    @property
    def rows_dropped(self) -> int:
        """Rows dropped by all operators, for all reasons."""
        return sum(d.rows for d in self.dropped)

    def __str__(self) -> str:
        lines = [
            f"{self.pipeline}: {self.rows_in} rows in, {self.rows_out} out, {self.already} there "
            f"already, {self.rows_dropped} dropped, in {self.seconds:.2f} s"
        ]
        lines += [f"  {d.rows:>6}  {d.operator}: {d.reason}" for d in self.dropped]
        return "\n".join(lines)
