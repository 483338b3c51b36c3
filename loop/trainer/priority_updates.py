"""Store new priorities of a step's rows, which later draws use."""

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from ...store.errors import JobError, QueryError
from ...store.query import QuerySession, query_error
from ..runs.job import Job

SEEN = pa.schema(
    [
        ("experience_id", pa.string()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("surprise", pa.float64()),
        ("lag", pa.int64()),
        ("epoch", pa.int64()),
        ("weight", pa.float64()),
    ]
)
"""The columns of a step's rows that an expression may name.

`surprise` is the mean negative log-prob of the row's trained tokens before the step, in nats;
`epoch` the number of times that the run has drawn the row, this one included.
"""


class Priorities:
    """Evaluates `trainer.priority_update` for a step's rows; stores it in `experience_values`."""

    def __init__(self, job: Job, expression: str) -> None:
        """Check the expression; QueryError if it does not parse, or is not a number."""
        self._job, self._expression = job, expression
        self._console = QuerySession(views=False)
        kind = self._ask(SEEN.empty_table()).column("value").type
        is_number = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
        if not any(check(kind) for check in is_number):
            raise QueryError(
                f"`trainer.priority_update` must be a number, got {kind} from {expression!r}"
            )

    def store(self, rows: pl.DataFrame, *, step: int) -> None:
        """Append the priorities of a step's rows; JobError for a negative or infinite value."""
        given = self._ask(rows.select(SEEN.names).to_arrow().cast(SEEN))
        values = pc.cast(given.column("value"), pa.float64())
        # NULL is allowed: the row keeps its priority, so nothing is stored for it below.
        good = pc.fill_null(pc.and_(pc.is_finite(values), pc.greater_equal(values, 0.0)), True)  # noqa: FBT003
        bad = pc.index(good, False).as_py()
        if bad >= 0:
            raise JobError(
                f"`trainer.priority_update` {self._expression!r} is {values[bad]} for experience "
                f"`{given.column('experience_id')[bad]}`, expected a finite number, 0 or more"
            )
        version = self._job.step_id(step)
        # A row drawn twice has two values, and its key (id, name, version) can have only one.
        made = pl.DataFrame(pl.from_arrow(given)).unique("experience_id", maintain_order=True)
        self._job.store.append(
            "experience_values",
            made.select(
                experience_id="experience_id",
                name=pl.lit("priority"),
                version=pl.lit(version),
                value=pl.col("value").cast(pl.Float64),
                run_id=pl.lit(self._job.run_id),
                attempt=pl.lit(self._job.attempt),
                step=pl.lit(step),
            ).filter(pl.col("value").is_not_null()),
        )

    def _ask(self, rows: pa.Table) -> pa.Table:
        what = f"`trainer.priority_update` {self._expression!r}"
        self._console.put("rows", rows)
        self._console.show({}, self._job.store.open_at)
        try:
            # on a line of its own: the expression may end in a `--` comment
            query = f"SELECT experience_id, ({self._expression}\n) AS value FROM rows"
            return self._console.sql(query, what=what).to_arrow_table()
        except duckdb.Error as error:
            raise query_error(error, what) from error
