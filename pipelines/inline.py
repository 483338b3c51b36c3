"""Operators inside a job, on rollouts before they are stored or rows before training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from ..operators import Operator, resolve
from ..operators.resolve import Spec
from ..store import Experience, Store, side_columns
from ..store.errors import ConfigError
from ..store.schema import TABLES
from ..store.validate import conform
from .plan import check_order

KEPT = frozenset(
    (
        *("experience_id", "run_id", "task_id", "group_id", "rollout_index", "batch"),
        *("group_index", "parent_id", "purpose"),
        *("source", "policy_version", "segments", "token_ids", "tokenizer", "loss_mask"),
        *("logprobs", "prompt_length", "num_tokens", "drop_reason", "metrics", "created_at"),
        *("temperature", "top_p", "top_k", "min_p", "sampling"),
    )
)
"""Columns that no operator may set: the row's identity, and what was sampled."""

DRAWN = frozenset({"allowed", "digest", "epoch", "lag", "was_text", "weight"})
"""Columns that a training step adds to its rows itself."""

STORED = tuple(name for name in TABLES["experiences"].names if name != "advantage")
"""Columns that are read for a trainer's chain; the advantage is computed in the step."""

_ID = "experience_id"
_LONGEST = 2000
"""Most characters of a drop_reason."""


@dataclass(frozen=True)
class ChainResult:
    """The result of a chain."""

    rows: pl.DataFrame
    """All rows, including dropped ones with the values set until then; new rows come last."""
    dropped: pl.DataFrame
    """(experience_id, operator, reason) of the rows that a filter dropped."""
    failed: pl.DataFrame
    """(experience_id, operator, error) of the rows on which an operator failed."""


class Chain:
    """Operators that are applied to groups of rows, one after another, as in a pipeline."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        self.operators = tuple(operators)

    def __bool__(self) -> bool:
        return bool(self.operators)

    @property
    def functions(self) -> dict[str, str]:
        """What is recorded for each operator: its position and name, and its fingerprint."""
        return {f"operator:{i}:{op}": op.fingerprint for i, op in enumerate(self.operators, 1)}

    def reads(self, known: Sequence[str]) -> list[str]:
        """Return those of the known columns that the operators read."""
        if any(op.reads_all for op in self.operators):
            return list(known)
        read = {name for op in self.operators for name in (*op.reads, *op.may_read)}
        return [name for name in known if name in read]

    def treat(self, rows: pl.DataFrame) -> ChainResult:
        """Apply the operators to whole groups of rows with unique ids.

        Rows that a filter drops do not reach later operators. Raises OperatorError when an
        invariant is broken.
        """
        empty = {_ID: pl.String(), "operator": pl.String()}
        dropped = [pl.DataFrame(schema={**empty, "reason": pl.String()})]
        failed = [pl.DataFrame(schema={**empty, "error": pl.String()})]
        gone: list[pl.DataFrame] = []
        left = rows
        for op in self.operators:
            applied, by = op.apply(left), pl.lit(op.name).alias("operator")
            dropped.append(applied.dropped.select(_ID, by, "reason"))
            failed.append(applied.failed.select(_ID, by, "error"))
            # As they are now: no later operator sees them, and they are stored with the
            # values set so far.
            gone.append(left.join(applied.dropped, on=_ID, how="semi", maintain_order="left"))
            left = applied.rows
        all_rows = pl.concat([left, *gone], how="diagonal_relaxed")
        placed = rows.select(_ID).with_row_index("_place")
        all_rows = all_rows.join(placed, on=_ID, how="left", maintain_order="left")
        all_rows = all_rows.sort("_place", nulls_last=True, maintain_order=True).drop("_place")
        return ChainResult(all_rows, pl.concat(dropped), pl.concat(failed))


def explorer_chain(specs: Sequence[Spec]) -> Chain:
    """Return the chain of an explorer, checked before any work.

    Raises OperatorError for operators that do not fit the columns or each other, ConfigError for
    operators that need more than a batch of rollouts, or write what the table cannot store.
    """
    given = _experiences()
    chain = _checked(
        specs, given, "explorer.operators", kinds="clean derive filter prioritize augment"
    )
    for op in chain.operators:
        after = op.columns_after(given)
        for name in op.writes:
            if name not in given and not (after[name].is_numeric() or after[name] == pl.Boolean):
                raise ConfigError(
                    f"`explorer.operators`: `{op.name}` writes `{name}`, {after[name]}, for which "
                    "`experiences` has no place: numbers go to `metrics`; use a pipeline"
                )
        given = after
    return chain


def trainer_chain(
    specs: Sequence[Spec], side: Sequence[str], *, credit: Operator | None, grouped: bool
) -> Chain:
    """Return the chain of a trainer whose rows have side columns; `credit` sets the advantage.

    Raises what `explorer_chain` raises, and ConfigError for a chain by which the statistics of a
    group would not cover the whole group.
    """
    side_types = {
        c.alias: pl.Float64() if c.value in ("value", "score") else pl.String()
        for c in side_columns.parse_all(side)
    }
    given = pl.Schema({**_experiences(), **side_types})
    kinds = "clean derive filter prioritize"
    chain = _checked(specs, given, "trainer.operators", kinds=kinds)
    row_filter: Operator | None = None
    for op in chain.operators:
        if op.scope == "group" and not grouped:
            raise ConfigError(
                f"`trainer.operators`: `{op.name}` sees groups, and this algorithm draws single "
                "rows; put it into `explorer.operators` or a pipeline"
            )
        shared = sorted({*op.writes} & {*(credit.reads if credit else ())})
        if row_filter and credit and credit.whole_groups and shared:
            raise ConfigError(
                f"`trainer.operators`: `{row_filter.name}` drops single rows before `{op.name}` "
                f"sets `{shared[0]}`, and `{credit.name}` compares the `{shared[0]}` of whole "
                f"groups; put `{op.name}` before `{row_filter.name}`"
            )
        if op.kind == "filter" and not op.whole_groups:
            # The first is the one to name: whatever follows sees only the rows that it left.
            row_filter = row_filter or op
    return chain


def _experiences() -> pl.Schema:
    return pl.DataFrame(pl.from_arrow(TABLES["experiences"].schema.empty_table())).schema


def _checked(specs: Sequence[Spec], given: pl.Schema, where: str, *, kinds: str) -> Chain:
    """Build the operators, and check their kinds, columns, order and scope."""
    chain = Chain([resolve(spec) for spec in specs])
    check_order(chain.operators)
    for op in chain.operators:
        if op.kind not in kinds.split():
            raise ConfigError(
                f"`{where}`: `{op.name}` is a {op.kind}, expected one of {kinds}; put it into a "
                "pipeline over the table `experiences`"
            )
        if op.scope == "all":
            raise ConfigError(
                f"`{where}`: `{op.name}` sees all rows, and here come the rows of some groups at a "
                "time; put it into a pipeline over the table `experiences`"
            )
        for name in op.writes:
            if name in KEPT or name in DRAWN:
                raise ConfigError(
                    f"`{where}`: `{op.name}` writes `{name}`, which says what a row is or what was "
                    "sampled, and stays; let it write another column"
                )
        given = op.columns_after(given)
    return chain


def apply_before_store(
    chain: Chain, rows: Sequence[Experience]
) -> tuple[list[Experience], ChainResult]:
    """Return the rows of finished groups after the chain, followed by new rows.

    All rows are kept: one that a filter drops gets a `drop_reason`. Columns that `experiences` does
    not have become `metrics`.
    """
    given = pl.DataFrame(pl.from_arrow(conform(TABLES["experiences"], rows)))
    treated = chain.treat(given)
    reasons = {i: f"{op}: {why}"[:_LONGEST] for i, op, why in treated.dropped.rows()}
    written = dict.fromkeys(name for op in chain.operators for name in op.writes)
    values = treated.rows.select(_ID, *written).to_dicts()
    # new rows, for which there are more values, follow below
    made = [_set(row, v, reasons) for row, v in zip(rows, values, strict=False)]
    for row, value in zip(treated.rows[len(rows) :].to_dicts(), values[len(rows) :], strict=True):
        made.append(_set(Experience.from_row(row), value, reasons))
    return made, treated


def apply_before_train(chain: Chain, rows: pl.DataFrame) -> tuple[pl.DataFrame, ChainResult]:
    """Return a step's rows, in order, with the columns of the chain, and `left_out` with reasons.

    A row that was drawn twice in one step is processed once. The `advantage` is the one that the
    chain sets in this step; a stored advantage is ignored.
    """
    if "advantage" not in rows.columns:
        rows = rows.with_columns(advantage=pl.lit(None, pl.Float64))
    # a row drawn twice would count twice in the statistics of its group
    made = chain.treat(rows.unique(_ID, keep="first", maintain_order=True))
    written = dict.fromkeys(name for op in chain.operators for name in op.writes)
    why = made.dropped.select(_ID, left_out=pl.format("{}: {}", "operator", "reason"))
    message = made.rows.select(_ID, *written).join(why, on=_ID, how="left")
    kept = rows.drop(*written, strict=False)
    return kept.join(message, on=_ID, how="left", maintain_order="left"), made


def record(store: Store, treated: ChainResult, *, lineage_id: str, drops: bool = False) -> None:
    """Store errors of rows in `operator_errors` and, with `drops`, the reasons of dropped rows."""
    by = pl.lit(lineage_id).alias("lineage_id")
    if treated.failed.height:
        store.append("operator_errors", treated.failed.with_columns(by))
    if drops and treated.dropped.height:
        store.append("drops", treated.dropped.with_columns(by))


def _set(row: Experience, values: Mapping[str, Any], reasons: Mapping[str, str]) -> Experience:
    values = {name: value for name, value in values.items() if name != _ID}
    own = {n: v for n, v in values.items() if n in TABLES["experiences"].names}
    parsed = Experience.from_row({"task_id": row.task_id, **own})
    numbers = {n: float(v) for n, v in values.items() if n not in own and v is not None}
    return replace(
        row,
        **{name: getattr(parsed, name) for name in own},
        metrics={**row.metrics, **numbers},
        # A reason that the row brought with it is the earlier one, and stays.
        drop_reason=row.drop_reason or reasons.get(str(row.experience_id)),
    )
