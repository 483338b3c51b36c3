"""What a report shows beyond curves: samples, failures, and what two runs differ in."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...store import Store
from ...store.errors import ConfigError
from ...store.query import literal, quoted

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where samples are taken unless other quantiles are given."""
_LATEST = 0.8
"""Sampled rows are of the last fifth of the steps."""
_TEXT = 4_000
"""Most characters of a text in the report."""


@dataclass(frozen=True)
class Table:
    """Rows to show, and the query that returns them."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    sql: str


def table(store: Store, sql: str, *, limit: int = 50) -> Table:
    """Return at most `limit` rows of a query."""
    found = store.sql(sql)
    return Table(found.columns, found.limit(limit).fetchall(), " ".join(sql.split()))


def parse_quantiles(text: str) -> tuple[float, ...]:
    """Return quantiles that are separated by commas.

    >>> parse_quantiles("0, 0.5, 1")
    (0.0, 0.5, 1.0)

    Raises ConfigError for what is not a number from 0 to 1.
    """
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= one <= 1 for one in found):
        raise ConfigError(f"quantiles are numbers from 0 to 1 such as `0,0.5,1`, got `{text}`")
    return found


def samples(store: Store, run_id: str, quantiles: Sequence[float] = QUANTILES) -> Table:
    """Return the rows at quantiles of the reward, among those that the last steps trained on.

    Of a run without a trainer, among those of its last batches. Rows of equal reward are in the
    order of their ids, so that the same store gives the same rows.
    """
    run = literal(run_id)
    drawn = (
        "SELECT DISTINCT experience_id, as_drawn(d.replaced, 'reward', e.reward) AS reward "
        "FROM draws_current d JOIN experiences e USING (experience_id) "
        f"WHERE d.run_id = {run} AND d.step > "
        f"(SELECT {_LATEST} * max(step) FROM draws_current WHERE run_id = {run})"
    )
    sampled = (
        f"SELECT experience_id, reward FROM experiences_current WHERE run_id = {run} AND batch >= "
        f"(SELECT {_LATEST} * max(batch) FROM experiences_current WHERE run_id = {run})"
    )
    # a run that only explored has no draws to choose from
    [(is_trained,)] = store.sql(
        f"SELECT count(*) > 0 FROM draws_current WHERE run_id = {run}"
    ).fetchall()
    places = ", ".join(f"1 + floor({q} * (n - 1))" for q in quantiles)
    return table(
        store,
        f"""
        WITH chosen AS (
            SELECT experience_id, reward, (place - 1) / greatest(n - 1, 1) AS quantile FROM (
                SELECT *, row_number() OVER (ORDER BY reward, experience_id) AS place,
                       count(*) OVER () AS n
                FROM ({drawn if is_trained else sampled}) WHERE reward IS NOT NULL)
            WHERE place IN ({places}))
        SELECT c.experience_id, c.reward, c.quantile, e.rewards, e.finish_reason, e.policy_version,
               e.num_tokens, e.prompt_text[:{_TEXT}] AS prompt_text,
               e.response_text[:{_TEXT}] AS response_text
        FROM chosen c JOIN experiences e USING (experience_id) ORDER BY c.quantile, experience_id
        """,
        limit=len(quantiles),
    )


def failures(store: Store, run_id: str) -> dict[str, Table]:
    """Return what went wrong: jobs, dropped and unscored rollouts, errors of operators."""
    run = literal(run_id)
    queries = {
        "Jobs that did not end well": (
            "SELECT job, attempt, status, error, ended_at FROM job_events "
            f"WHERE run_id = {run} AND status IN ('failed', 'interrupted') ORDER BY created_at"
        ),
        "Rollouts dropped": (
            "SELECT drop_reason, count(*) AS num_rows FROM experiences "
            f"WHERE run_id = {run} AND drop_reason IS NOT NULL GROUP BY ALL ORDER BY 2 DESC, 1"
        ),
        "Rollouts without a reward": (
            "SELECT batch, count(*) AS num_rows FROM experiences WHERE "
            f"run_id = {run} AND drop_reason IS NULL AND reward IS NULL GROUP BY ALL ORDER BY 1"
        ),
        "Errors on rows": (
            "SELECT operator, error, count(*) AS num_rows FROM operator_errors "
            f"WHERE starts_with(lineage_id, {literal(run_id + '/')}) "
            "GROUP BY ALL ORDER BY 3 DESC, 1, 2"
        ),
    }
    found = {name: table(store, sql) for name, sql in queries.items()}
    # an empty table would look like a failure that was found
    return {name: one for name, one in found.items() if one.rows}


def differences(*configs: str) -> list[tuple[str, ...]]:
    """Return the settings in which configurations, as JSON text, differ: key and their values.

    >>> differences('{"a": {"b": 1}, "c": 2}', '{"a": {"b": 3}, "c": 2}')
    [('a.b', '1', '3')]
    """
    trees = [dict(_leaves(json.loads(text))) for text in configs]
    # keys of any: a section that only some of them have is a difference, too
    keys = sorted({key for tree in trees for key in tree})
    rows = [(key, *(tree.get(key, "") for tree in trees)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def last_values(store: Store, run_id: str, other: str) -> Table:
    """Return the metrics of two runs, each the mean of the last tenth of the steps."""
    of_run = (
        "(SELECT name, avg(value) AS value FROM (SELECT name, value, step > 0.9 * max(step) OVER "
        "(PARTITION BY name) AS is_late FROM metrics_current WHERE run_id = {0}) "
        "WHERE is_late GROUP BY name)"
    )
    return table(
        store,
        f"SELECT name, a.value AS {quoted(run_id)}, b.value AS {quoted(other)}, "
        f"a.value - b.value AS difference FROM {of_run.format(literal(run_id))} a "
        f"JOIN {of_run.format(literal(other))} b USING (name) "
        # equal ones are most, and say nothing
        "WHERE a.value IS DISTINCT FROM b.value ORDER BY name",
        limit=200,
    )
