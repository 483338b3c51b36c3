"""The page: what is known of a run, in one HTML file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from pydantic import ValidationError

from ...store import Store
from ...store.errors import NotFoundError, nearest
from ...store.lineage.policy import PolicyLineage, of_policy
from ...store.query import literal
from ..audits.bias import bias
from ..audits.drop import drop
from ..config import RunConfig
from ..runs.job import newest_config, run_names
from . import curves, drawing
from .details import QUANTILES, Table, differences, failures, last_values, samples, table
from .summary import summary


@dataclass(frozen=True)
class Report:
    """What is known of a run, and of one that it is compared with."""

    run_id: str
    against: str | None
    summaries: list[dict[str, Any]]
    jobs: Table
    curves: Mapping[str, Mapping[str, curves.Points]]
    samples: Table
    findings: dict[str, list[str]]
    """What audits found, by the command that gives the same."""
    failures: dict[str, Table]
    settings: list[tuple[str, ...]]
    """Settings in which the two runs differ: key, this run's value, the other's."""
    metrics: Table | None
    """Metrics of both, over the last tenth of their steps."""
    lineage: PolicyLineage | None
    """Of the newest version; None if none was published."""
    config: str
    """The configuration as YAML."""


def read(
    store: Store, run_id: str, against: str | None = None, *, quantiles: Sequence[float] = QUANTILES
) -> Report:
    """Return the report of a run, compared with another one if it is named.

    Samples are rows at these quantiles of the reward.

    Raises NotFoundError for a run that was never started on the store.
    """
    runs = [run_id] if against is None else [run_id, against]
    configs = [_config(store, name) for name in runs]
    summaries = [summary(store, name) for name in runs]
    version = summaries[0]["policy_version"]
    names = ", ".join(map(literal, runs))
    return Report(
        run_id=run_id,
        against=against,
        summaries=summaries,
        jobs=table(
            store,
            "SELECT run_id, job, attempt, status, code_version, started_at, ended_at, "
            f"ended_at - started_at AS took FROM runs WHERE run_id IN ({names}) ORDER BY ALL",
        ),
        curves=curves.read(store, runs),
        samples=samples(store, run_id, quantiles),
        findings=_findings(store, run_id, summaries[0]["steps"]),
        failures=failures(store, run_id),
        settings=differences(*configs) if against else [],
        metrics=last_values(store, run_id, against) if against else None,
        # version 0 is what the run began from: no step made it
        lineage=of_policy(store, run_id, version) if version else None,
        config=yaml.safe_dump(_given(configs[0]), sort_keys=False, allow_unicode=True, width=100),
    )


def write_report(
    store: Store,
    path: Path,
    run_id: str,
    against: str | None = None,
    *,
    quantiles: Sequence[float] = QUANTILES,
) -> Report:
    """Write the report of a run as an HTML file that needs no other; return what it shows.

    Texts of rollouts are escaped, and a policy in the file forbids all scripts and all requests.
    """
    report = read(store, run_id, against, quantiles=quantiles)
    pictures = [drawing.svg(curves.CURVES[name], of) for name, of in report.curves.items()]
    html = files(__package__ or "").joinpath("page.html").read_text(encoding="utf-8")
    # autoescape: whatever rollouts contain is shown as text. StrictUndefined: a name that is
    # missing fails here, and does not leave a hole in the page.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["shown"] = _shown
    # only now: a run that does not exist leaves neither a folder nor half a page
    path.parent.mkdir(parents=True, exist_ok=True)
    lineage = asdict(report.lineage) if report.lineage else {}
    page = environment.from_string(html).render(
        report=report,
        pictures=pictures,
        lineage={name: value for name, value in lineage.items() if value and name in _LINEAGE},
        names=_LINEAGE,
    )
    path.write_text(page, encoding="utf-8")
    return report


_LINEAGE = {
    "begun_from": "Weights it began from",
    "rows": "Rows",
    "sources": "Where the rows came from",
    "pipelines": "Pipelines",
    "functions": "Workflows and rewards",
    "side_columns": "Side columns",
    "tokenizers": "Tokenizers",
    "snapshots": "Snapshots",
    "batches_digest": "Digest of all batches",
    "code_versions": "Versions of rlake",
}
"""What the page shows of the lineage, and how it is called."""


def _findings(store: Store, run_id: str, steps: int) -> dict[str, list[str]]:
    if not steps:
        return {}
    found = bias(store, run_id)
    made = {f"rlake audit bias --run {run_id}": [*found.findings, *found.facts]}
    [(first, last)] = store.sql(
        f"SELECT min(step), max(step) FROM steps WHERE run_id = {literal(run_id)}"
    ).fetchall()
    # a fifth of the steps has rows enough to compare, and still is the beginning or the end
    fifth = (last - first + 1) // 5
    if fifth:
        early, late = (first, first + fifth - 1), (last - fifth + 1, last)
        change = drop(store, run_id, late, early)
        before, after = change.reward_mean
        whole = f"The mean reward went from {before:.4f} to {after:.4f}."
        ranges = " --against ".join(f"{start}:{end}" for start, end in (late, early))
        made[f"rlake audit drop --run {run_id} --steps {ranges}"] = [whole, *change.findings]
    return made


def _config(store: Store, run_id: str) -> str:
    found = newest_config(store, run_id)
    if found is None:
        near = nearest(run_id, run_names(store))
        raise NotFoundError(f"run `{run_id}` does not exist{near}")
    return found


def _given(config: str) -> dict[str, Any]:
    try:
        return RunConfig.model_validate_json(config).plain(exclude_defaults=True)
    except ValidationError:  # a run of another version of rlake, whose keys differ
        return json.loads(config)


def _shown(value: Any) -> str:
    """Return a value as people read it: numbers of four digits, lists and rows in one line."""
    if value is None:
        return ""
    # before int, which it is one of
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        # stored times are UTC, and so the page does not depend on where it was written
        return value.astimezone(UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    if isinstance(value, timedelta):
        return str(timedelta(seconds=round(value.total_seconds())))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items() if part != [])
    if isinstance(value, list | tuple):
        return "; ".join(map(_shown, value))
    return str(value)
