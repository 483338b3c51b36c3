"""The command `lineage`: from a policy to the rows that made it, and from a row to its policies."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from rich.tree import Tree

from . import lineage_text
from .app import PROOF, AtOption, JsonOption, StoreOption, app, open_store
from .tables import counted, print_json, screen

if TYPE_CHECKING:
    from ...store.lineage.policy import ExperienceLineage, PolicyLineage

_MANY = 6
"""Most lines under one heading; all are in `--json`."""


@app.command(rich_help_panel=PROOF)
def lineage(
    policy: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Weights: a version, or RUN:VERSION."),
    ] = None,
    experience: Annotated[str | None, typer.Option(metavar="ID", help="An experience.")] = None,
    run: Annotated[
        str | None, typer.Option(metavar="NAME", help="The policy's run; else the only one.")
    ] = None,
    store: StoreOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what made a policy, down to its rows; or what became of an experience."""
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
    """Take `RUN:VERSION` or `VERSION` apart."""
    named, _, version = written.rpartition(":")
    if not version.isdecimal() or len(version) > _DIGITS:
        raise typer.BadParameter(
            f"`{written}` is no version of weights; write `40`, or `RUN:40`",
            param_hint="--policy",
        )
    if named and run and named != run:
        raise typer.BadParameter(f"--policy names run `{named}`, and --run `{run}`")
    return named or run, int(version)


def _policy_tree(found: "PolicyLineage") -> Tree:
    weights, rows = found.weights, found.rows
    tree = _tree(f"policy {found.run_id}:{found.policy_version}", lineage_text.weights(weights))
    _branch(tree, "trained from", [lineage_text.chain(found)])
    _branch(tree, "steps", lineage_text.steps(found))
    if rows["num_rows"]:
        _branch(tree, "rows", lineage_text.rows(rows))
        _branch(tree, "written by", [lineage_text.source(s) for s in found.sources])
    pipelines = [
        f"{p['did']} {counted(p['num_experiences'], 'row')}: {lineage_text.pipeline(p)}"
        for p in found.pipelines
    ]
    _branch(tree, "pipelines", pipelines)
    _branch(tree, "functions", [lineage_text.function(f, found.run_id) for f in found.functions])
    _branch(tree, "side columns", [lineage_text.side(c) for c in found.side_columns])
    _branch(tree, "tokenizers", found.tokenizers)
    _branch(tree, "snapshots", [lineage_text.snapshot(s) for s in found.snapshots])
    _branch(
        tree,
        "code",
        [f"rlake {', '.join(found.code_versions)}", *lineage_text.settings(found.config)],
    )
    return tree


def _experience_tree(found: "ExperienceLineage") -> Tree:
    row = found.experience
    tree = _tree(
        f"experience {found.experience_id}", f"reward {lineage_text.number(row['reward'])}"
    )
    _branch(tree, "comes from", [*lineage_text.origin(row), *lineage_text.made_by(found.pipeline)])
    _branch(tree, "made from", [lineage_text.relative(p) for p in found.parents])
    task = found.task
    asked = (
        f"{row['task_id']}: {lineage_text.cut(task['prompt_text'])}"
        f" -> {lineage_text.cut(task['answer'])}"
        if task
        else None
    )
    _branch(tree, "task", [asked or f"{row['task_id']}, which is not in this store"])
    _branch(tree, "drawn", [lineage_text.draw(d) for d in found.draws] or ["never"])
    _branch(tree, "went into", [lineage_text.policies(p) for p in found.policies] or ["no policy"])
    _branch(tree, "others made from it", [lineage_text.relative(c) for c in found.children])
    _branch(tree, "pairs", [lineage_text.pair(p, found.experience_id) for p in found.preferences])
    _branch(tree, "scores", [lineage_text.score(s) for s in found.scores])
    _branch(tree, "feedback", [lineage_text.feedback(f) for f in found.feedback])
    _branch(tree, "derived", [lineage_text.derived(d) for d in found.derived])
    _branch(tree, "left out", [lineage_text.drop(d) for d in found.drops])
    return tree


def _tree(name: str, told: str) -> Tree:
    return Tree(Text.assemble((name, "bold"), "  ", told), guide_style="dim")


def _branch(tree: Tree, name: str, lines: Sequence[str]) -> None:
    """Add a heading with its lines; one line stands beside it, and none leaves it out."""
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
