"""What lineage found, told in lines that a person reads."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .tables import counted

if TYPE_CHECKING:
    from ...store.lineage.policy import PolicyLineage

Row = Mapping[str, Any]


def weights(row: Row) -> str:
    """Say which attempt made the weights, when, and their digest."""
    return f"attempt {row['attempt']}, {_time(row['created_at'])}, digest {row['digest'][:16]}"


def chain(found: "PolicyLineage") -> str:
    """Say from which versions it was trained, nearest first, the middle of many left out."""
    begun = f" <- {found.begun_from}" if found.begun_from else ""
    if not found.parents:
        return found.begun_from or "the start"
    shown = [str(v) for v in found.parents]
    middle = [f"… {len(shown) - 4} more …"] if len(shown) > 5 else shown[3:-1]
    ends = [*shown[:3], *middle, shown[-1]] if len(shown) > 3 else shown
    return f"{' <- '.join(ends)}{begun}"


def steps(found: "PolicyLineage") -> list[str]:
    """Say which attempt took which steps."""
    if not found.attempts:
        return ["none"]
    lines = [
        f"{_span(a['first_step'], a['last_step'])} by attempt {a['attempt']}: "
        f"{counted(a['num_rows'], 'draw')}"
        for a in found.attempts
    ]
    digest = found.batches_digest
    return [*lines, f"digest of all batches in order: {digest}"] if digest else lines


def rows(found: Row) -> list[str]:
    """Say how many draws and rows there were, with what reward and lag."""
    experiences = counted(found["num_experiences"], "experience")
    lines = [
        f"{counted(found['num_rows'], 'draw')} of {experiences} "
        f"in {counted(found['num_groups'], 'group')}",
        f"reward {number(found['reward_mean'])} on average, {number(found['reward_min'])} to "
        f"{number(found['reward_max'])}"
        + (f", NULL in {found['num_unscored']:,}" if found["num_unscored"] else ""),
    ]
    if found["lag_max"] is not None:
        lines.append(f"lag {number(found['lag_mean'])} on average, at most {found['lag_max']}")
    if found["num_weightless"]:
        lines.append(f"{found['num_weightless']:,} drawn with weight 0, for their groups only")
    if found["num_gone"]:
        lines.append(f"{found['num_gone']:,} no longer stored")
    return lines


def source(row: Row) -> str:
    """Say where some of the rows came from, and which policies wrote them."""
    if row["source"] is None:
        return f"{counted(row['num_rows'], 'draw')} of rows that are no longer stored"
    first, last = row["policy_version_min"], row["policy_version_max"]
    by = "" if first is None else f", policy {_span(first, last)}"
    of = f" of run {row['run_id']}" if row["run_id"] else ""
    named = f", drawn as `{row['drawn_as']}`" if row["drawn_as"] else ""
    return f"{row['source']}{of}{by}: {counted(row['num_experiences'], 'experience')}{named}"


def pipeline(row: Row) -> str:
    """Name a pipeline run with its operators."""
    operators = f": {'; '.join(row['operators'])}" if row["operators"] else ""
    if row["pipeline"] is None:  # by retention, or by a run that was killed before it was done
        return row["lineage_id"]
    return f"{row['pipeline']} ({row['lineage_id']}){operators}"


def function(row: Row, run_id: str) -> str:
    """Name a function with the digest of its source."""
    attempts = ", ".join(map(str, row["attempts"]))
    of = "" if row["run_id"] == run_id else f" of run {row['run_id']}"
    return f"{row['name']} {row['digest']}{of}, attempt {attempts}"


def side(row: Row) -> str:
    """Name a side column with the versions that the rows have of it."""
    versions = ", ".join(f"{v['version']} of {v['num_experiences']:,}" for v in row["versions"])
    return f"{row['spec']}: {versions or 'of no row'}"


def snapshot(row: Row) -> str:
    """Name a snapshot."""
    tables = row["tables"]
    return f"{row['name']}, {_time(row['created_at'])}, experiences at {tables['experiences']}"


def settings(config: Row) -> Iterator[str]:
    """Yield what of the configuration says how the policy was trained."""
    for name in ("algorithm", "seed"):
        if name in config:
            yield f"{name}: {_compact(config[name])}"
    for name in ("sampler", "where", "source", "at"):
        value = (config.get("trainer") or {}).get(name)
        if value is not None:
            yield f"trainer.{name}: {_compact(value)}"


def _compact(value: Any) -> str:
    """Write a value as in a configuration, what is not set left out."""
    if isinstance(value, Mapping):
        given = [f"{k}: {_compact(v)}" for k, v in value.items() if v is not None]
        return f"{{{', '.join(given)}}}"
    return str(value)


def origin(row: Row) -> Iterator[str]:
    """Yield who made the experience, and when."""
    of = f" of run {row['run_id']}, batch {row['step']}" if row["run_id"] else ""
    yield f"{row['source']}{of}, group {row['group_id']}, {_time(row['created_at'])}"
    if row["segments"]:
        parts = [f"{s['policy_version']} ({s['num_tokens']} tokens)" for s in row["segments"]]
        yield f"written by policy {', then '.join(parts)}"
    elif row["policy_version"] is not None:
        yield f"written by policy {row['policy_version']}"
    if row["tokenizer"]:
        yield f"made into tokens by tokenizer {row['tokenizer']}"
    if row["drop_reason"]:
        yield f"not to be trained on: {row['drop_reason']}"


def made_by(found: Row | None) -> list[str]:
    """Name the pipeline run that stored the experience, if one did."""
    return [f"stored by pipeline {pipeline(found)}"] if found else []


def relative(row: Row) -> str:
    """Name an experience that this one was made from, or the other way round."""
    of = f" of run {row['run_id']}" if row["run_id"] else ""
    return f"{row['experience_id']}, {row['source']}{of}, reward {number(row['reward'])}"


def draw(row: Row) -> str:
    """Say in which step the experience was drawn, and how."""
    lag = "" if row["lag"] is None else f", lag {row['lag']}"
    line = f"run {row['run_id']} step {row['step']} place {row['position']}"
    line += f", weight {number(row['weight'])}{lag}, {_strategy(row['sampler'])}"
    return line if row["counts"] else f"{line}; superseded: attempt {row['attempt']} was done again"


def _strategy(sampler: str) -> str:
    """Return the name of how a row was drawn; its parameters are in `--json`."""
    try:
        return str(json.loads(sampler)["strategy"])
    except (ValueError, KeyError, TypeError):
        return sampler


def policies(row: Row) -> str:
    """Say which versions of a run the experience went into."""
    if not row["num_versions"]:
        return f"run {row['run_id']} from step {row['first_step']} on; no weights published since"
    newer = row["num_versions"] - 1
    more = f", and {counted(newer, 'version')} after it, to {row['last_version']}" if newer else ""
    return f"{row['run_id']}:{row['first_version']}{more}"


def pair(row: Row, experience_id: str) -> str:
    """Say against which other experience this one was preferred, or not."""
    is_chosen = row["chosen_id"] == experience_id
    other = f"better than {row['rejected_id']}" if is_chosen else f"worse than {row['chosen_id']}"
    return f"{other} ({row['source']})"


def drop(row: Row) -> str:
    """Say which operator of which pipeline left the experience out, and why."""
    of = f" of {row['pipeline']}" if row["pipeline"] else ""
    return f"{row['operator']}{of}: {row['reason']}"


def score(row: Row) -> str:
    """Say what a scorer gave."""
    why = f" ({cut(row['detail'])})" if row["detail"] else ""
    return f"{row['scorer']}@{row['scorer_version']} {number(row['value'])}{why}"


def feedback(row: Row) -> str:
    """Say what an annotator gave."""
    said = [row["label"], row["score"] is not None and number(row["score"]), row["comment"]]
    return f"{row['annotator']}: {', '.join(str(s) for s in said if s)}"


def derived(row: Row) -> str:
    """Say what a derived value is."""
    value = row["text"] if row["value"] is None else number(row["value"])
    return f"{row['name']}@{row['version']} {value}"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def number(value: float | None) -> str:
    """Write a number, or NULL."""
    return "NULL" if value is None else f"{value:.4g}"


def _time(value: Any) -> str:
    return f"{value:%Y-%m-%d %H:%M:%S}"


def cut(text: str | None) -> str:
    """Write a text on one line, cut when it is long."""
    plain = " ".join((text or "NULL").split())
    return plain if len(plain) <= 100 else f"{plain[:99]}…"
