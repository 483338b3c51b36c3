"""How hard a task is: from how often it was solved, or from how long its solution is."""

from typing import Literal

import polars as pl

from .decorator import operator

_COUNTED = {
    "lines": r"(?m)^.*\S",
    "words": r"\S+",
    "sentences": r"[^.!?\s][^.!?]*",
    "characters": r"(?s).",
}


@operator("derive")
def difficulty(*, prior_mean: float = 0.5, prior_count: float = 0.0) -> pl.Expr:
    """Set `difficulty` to the share of rollouts that did not pass, from 0 (easy) to 1 (hard).

    It reads `num_scored` and `num_passed`, as the view `task_pass_rates` has them: `SELECT t.*,
    num_scored, num_passed FROM tasks t JOIN task_pass_rates USING (task_id)`. `prior_count`
    imaginary rollouts with the pass rate `prior_mean` are added, so that few rollouts count less.
    NULL for a task without a scored rollout: its difficulty is unknown.

    >>> rows = pl.DataFrame({"task_id": ["a", "b"], "num_scored": [8, None],
    ...                      "num_passed": [6, None]})
    >>> rows.pipe(difficulty())["difficulty"].to_list()
    [0.25, None]
    """
    scored = pl.col("num_scored").cast(pl.Float64)
    passed = pl.col("num_passed").cast(pl.Float64)
    value = 1 - (passed + prior_mean * prior_count) / (scored + prior_count)
    return pl.when(scored > 0).then(value).alias("difficulty")


@operator("derive")
def solution_steps(
    *, column: str = "answer", of: Literal["lines", "words", "sentences", "characters"] = "lines"
) -> pl.Expr:
    """Set `solution_steps` to how many lines, words or sentences a text has.

    A worked solution, such as GSM8K's answers, has a line a step; the longer, the harder. Blank
    lines do not count. NULL for a text that is NULL.

    >>> rows = pl.DataFrame({"task_id": ["a"], "answer": ["16 - 7 = 9\\n9 * 2 = 18\\n#### 18"]})
    >>> rows.pipe(solution_steps())["solution_steps"].to_list()
    [3]
    """
    count = pl.col(column).str.count_matches(_COUNTED[of])
    return count.cast(pl.Int64).alias("solution_steps")
