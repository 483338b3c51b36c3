"""The commands `lineage` and `verify`: what a policy was trained on, and the proof of it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from rich.tree import Tree

from ...store.errors import shorten
from .app import PROOF, AtOption, JsonOption, StoreOption, app, open_store, option
from .tables import counted, number, print_json, screen

if TYPE_CHECKING:
    from ...store.lineage.policy import ExperienceLineage, PolicyLineage

_MANY = 6
"""Most lines under one heading; all are in `--json`."""


@app.command(rich_help_panel=PROOF)
def lineage(
    policy: Annotated[
        str | None, option("Trace this policy version, or RUN:VERSION.", metavar="VERSION")
    ] = None,
    experience: Annotated[
        str | None, option("Trace the experience with this ID.", metavar="ID")
    ] = None,
    run: Annotated[
        str | None,
        option("Name the policy's run; needed where the store has several.", metavar="NAME"),
    ] = None,
    store: StoreOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Trace a policy to the rows that trained it, or an experience to its policies."""
    from ...store.lineage.policy import of_experience, of_policy

    if (policy is None) == (experience is None):
        raise typer.BadParameter("give either --policy or --experience")
    asked = _policy(policy, run) if policy is not None else None
    lake = open_store(store, at=at)
    if asked is not None:
        found = of_policy(lake, *asked)
        tree = _policy_tree(found)
    else:
        found = of_experience(lake, str(experience))
        tree = _experience_tree(found)
    if as_json:
        print_json(vars(found))
        return
    screen().print(tree)
    print(f'\nrlake sql "{found.sql}"')


_DIGITS = 18
"""Digits of the longest version: it is an integer of 64 bits."""


def _policy(written: str, run: str | None) -> tuple[str | None, int]:
    named, _, version = written.rpartition(":")
    if not version.isdecimal() or len(version) > _DIGITS:
        raise typer.BadParameter(
            f"`{written}` is not a policy version; write `40` or `RUN:40`", param_hint="--policy"
        )
    if named and run and named != run:
        raise typer.BadParameter(
            f"--policy names run `{named}`, but --run names `{run}`; leave one out"
        )
    return named or run, int(version)


def _policy_tree(found: "PolicyLineage") -> Tree:
    weights, rows = found.weights, found.rows
    tree = _tree(f"policy {found.run_id}:{found.policy_version}", _weights_line(weights))
    _branch(tree, "trained from", [_chain_line(found)])
    _branch(tree, "steps", _steps_lines(found))
    if rows["num_rows"]:
        _branch(tree, "rows", _rows_lines(rows))
        _branch(tree, "written by", [_source_line(s) for s in found.sources])
    pipelines = [
        f"{p['did']} {counted(p['num_experiences'], 'row')}: {_pipeline_line(p)}"
        for p in found.pipelines
    ]
    _branch(tree, "pipelines", pipelines)
    _branch(tree, "functions", [_function_line(f, found.run_id) for f in found.functions])
    _branch(tree, "side columns", [_side_line(c) for c in found.side_columns])
    _branch(tree, "tokenizers", found.tokenizers)
    _branch(tree, "snapshots", [_snapshot_line(s) for s in found.snapshots])
    _branch(
        tree, "code", [f"rlake {', '.join(found.code_versions)}", *_settings_lines(found.config)]
    )
    return tree


def _experience_tree(found: "ExperienceLineage") -> Tree:
    row = found.experience
    tree = _tree(f"experience {found.experience_id}", f"reward {number(row['reward'])}")
    made_by = [f"stored by pipeline {_pipeline_line(p)}" for p in [found.pipeline] if p]
    _branch(tree, "comes from", [*_origin_lines(row), *made_by])
    _branch(tree, "derived from", [_relative_line(p) for p in found.parents])
    task = found.task
    asked = (
        f"{row['task_id']}: {_cut(task['prompt_text'])} -> {_cut(task['answer'])}" if task else None
    )
    _branch(tree, "task", [asked or f"{row['task_id']}, which is not in this store"])
    _branch(tree, "drawn", [_draw_line(d) for d in found.draws] or ["never"])
    _branch(tree, "went into", [_policies_line(p) for p in found.policies] or ["no policy"])
    _branch(tree, "derived experiences", [_relative_line(c) for c in found.children])
    _branch(tree, "pairs", [_pair_line(p, found.experience_id) for p in found.preferences])
    _branch(tree, "scores", [_score_line(s) for s in found.scores])
    _branch(tree, "feedback", [_feedback_line(f) for f in found.feedback])
    _branch(tree, "derived", [_derived_line(d) for d in found.derived])
    _branch(tree, "dropped by", [_drop_line(d) for d in found.drops])
    return tree


def _tree(name: str, text: str) -> Tree:
    return Tree(Text.assemble((name, "bold"), "  ", text), guide_style="dim")


def _branch(tree: Tree, name: str, lines: Sequence[str]) -> None:
    """Add a heading with its lines; a single line goes next to it, and none omits it."""
    if not lines:
        return
    heading = Text(f"{name}  " if len(lines) == 1 else name, style="cyan")
    if len(lines) == 1:
        tree.add(heading.append(lines[0], style="default"))
        return
    branch = tree.add(heading)
    for line in lines[:_MANY]:
        branch.add(Text(line))
    if len(lines) > _MANY:
        branch.add(Text(f"and {len(lines) - _MANY} more; see `--json`", style="dim"))


@app.command(rich_help_panel=PROOF)
def verify(
    run: Annotated[str, option("Verify this run.", metavar="NAME")],
    step: Annotated[
        int | None, option("Verify only this training step.", min=1, default="all")
    ] = None,
    store: StoreOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove what a step was trained on: its rows are unchanged, and are drawn again.

    Reads the rows, compares their digests with those in `draws`, and draws the batch again from the
    seed, the step, and what was stored at the time.
    """
    from ...store.verify_draws import steps_of
    from ...store.verify_draws import verify as check
    from ..trainer.redraw import rebuild

    lake = open_store(store, at=at)
    steps = [step] if step is not None else steps_of(lake, run)
    wrong, message = 0, []
    with screen(stderr=True).status("verifying") as status:
        for number in steps:
            status.update(f"verifying step {number} of {steps[-1]}")
            verdict, again = check(lake, run, number), rebuild(lake, run, number)
            # Rows may be unchanged while the batch is drawn differently, and the other way round.
            wrong += not (verdict.holds and again.is_same)
            message.append({**vars(verdict), "holds": verdict.holds, "drawn_again": again.is_same})
            if not as_json and (step is not None or not (verdict.holds and again.is_same)):
                print(verdict, again, sep="\n")
    if as_json:
        print_json({"run": run, "steps": message, "holds": not wrong})
    elif step is None:
        print(f"{counted(len(steps), 'step')} of `{run}`: {wrong or 'none'} differ")
    if wrong:
        raise typer.Exit(1)


Row = Mapping[str, Any]


def _weights_line(row: Row) -> str:
    return f"attempt {row['attempt']}, {_time(row['created_at'])}, digest {row['digest'][:16]}"


def _chain_line(found: "PolicyLineage") -> str:
    """Return from which versions it was trained, nearest first, the middle of many left out."""
    begun = f" <- {found.begun_from}" if found.begun_from else ""
    if not found.parents:
        return found.begun_from or "the start"
    shown = [str(v) for v in found.parents]
    # A long run may have very many parents: the newest three and the first one say where it began.
    middle = [f"… {len(shown) - 4} more …"] if len(shown) > 5 else shown[3:-1]
    ends = [*shown[:3], *middle, shown[-1]] if len(shown) > 3 else shown
    return f"{' <- '.join(ends)}{begun}"


def _steps_lines(found: "PolicyLineage") -> list[str]:
    if not found.attempts:
        return ["none"]
    lines = [
        f"{_span(a['first_step'], a['last_step'])} by attempt {a['attempt']}: "
        f"{counted(a['num_rows'], 'draw')}"
        for a in found.attempts
    ]
    digest = found.batches_digest
    return [*lines, f"digest of all batches in order: {digest}"] if digest else lines


def _rows_lines(found: Row) -> list[str]:
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


def _source_line(row: Row) -> str:
    if row["source"] is None:
        return f"{counted(row['num_rows'], 'draw')} of rows that are no longer stored"
    first, last = row["policy_version_min"], row["policy_version_max"]
    by = "" if first is None else f", policy {_span(first, last)}"
    of = f" of run {row['run_id']}" if row["run_id"] else ""
    named = f", drawn as `{row['drawn_as']}`" if row["drawn_as"] else ""
    return f"{row['source']}{of}{by}: {counted(row['num_experiences'], 'experience')}{named}"


def _pipeline_line(row: Row) -> str:
    operators = f": {'; '.join(row['operators'])}" if row["operators"] else ""
    if row["pipeline"] is None:  # by retention, or by a run that was killed before it was done
        return row["lineage_id"]
    return f"{row['pipeline']} ({row['lineage_id']}){operators}"


def _function_line(row: Row, run_id: str) -> str:
    attempts = ", ".join(map(str, row["attempts"]))
    of = "" if row["run_id"] == run_id else f" of run {row['run_id']}"
    return f"{row['name']} {row['digest']}{of}, attempt {attempts}"


def _side_line(row: Row) -> str:
    versions = ", ".join(f"{v['version']} of {v['num_experiences']:,}" for v in row["versions"])
    return f"{row['spec']}: {versions or 'of no row'}"


def _snapshot_line(row: Row) -> str:
    tables = row["tables"]
    return f"{row['name']}, {_time(row['created_at'])}, experiences at {tables['experiences']}"


def _settings_lines(config: Row) -> Iterator[str]:
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


def _origin_lines(row: Row) -> Iterator[str]:
    of = f" of run {row['run_id']}, batch {row['batch']}" if row["run_id"] else ""
    yield f"{row['source']}{of}, group {row['group_id']}, {_time(row['created_at'])}"
    if row["segments"]:
        parts = [f"{s['policy_version']} ({s['num_tokens']} tokens)" for s in row["segments"]]
        yield f"written by policy {', then '.join(parts)}"
    elif row["policy_version"] is not None:
        yield f"written by policy {row['policy_version']}"
    if row["tokenizer"]:
        yield f"tokenized by {row['tokenizer']}"
    if row["drop_reason"]:
        yield f"excluded from training: {row['drop_reason']}"


def _relative_line(row: Row) -> str:
    of = f" of run {row['run_id']}" if row["run_id"] else ""
    return f"{row['experience_id']}, {row['source']}{of}, reward {number(row['reward'])}"


def _draw_line(row: Row) -> str:
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


def _policies_line(row: Row) -> str:
    if not row["num_versions"]:
        return f"run {row['run_id']} from step {row['first_step']} on; no weights published since"
    newer = row["num_versions"] - 1
    more = f", and {counted(newer, 'version')} after it, to {row['last_version']}" if newer else ""
    return f"{row['run_id']}:{row['first_version']}{more}"


def _pair_line(row: Row, experience_id: str) -> str:
    is_chosen = row["chosen_id"] == experience_id
    other = f"better than {row['rejected_id']}" if is_chosen else f"worse than {row['chosen_id']}"
    return f"{other} ({row['source']})"


def _drop_line(row: Row) -> str:
    of = f" of {row['pipeline']}" if row["pipeline"] else ""
    return f"{row['operator']}{of}: {row['reason']}"


def _score_line(row: Row) -> str:
    why = f" ({_cut(row['detail'])})" if row["detail"] else ""
    return f"{row['scorer']}@{row['scorer_version']} {number(row['value'])}{why}"


def _feedback_line(row: Row) -> str:
    parts = [row["label"], row["score"] is not None and number(row["score"]), row["comment"]]
    return f"{row['annotator']}: {', '.join(str(s) for s in parts if s)}"


def _derived_line(row: Row) -> str:
    value = row["text"] if row["value"] is None else number(row["value"])
    return f"{row['name']}@{row['version']} {value}"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _time(value: Any) -> str:
    return f"{value:%Y-%m-%d %H:%M:%S}"


def _cut(text: str | None) -> str:
    return shorten(" ".join((text or "NULL").split()), 100)
