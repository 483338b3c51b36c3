"""The commands `audit`: questions that a run's stored history answers."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from .app import PROOF, AtOption, JsonOption, StoreOption, app, heavy, open_store, option
from .tables import print_heading, print_json, print_rows

commands = typer.Typer(help="Ask a run's history: what was it trained on, and why did it change?")
app.add_typer(commands, name="audit", rich_help_panel=PROOF, no_args_is_help=True)

RunOption = Annotated[str, option("Audit this run.", metavar="NAME")]


@commands.command()
def bias(
    run: RunOption, store: StoreOption = None, at: AtOption = None, as_json: JsonOption = False
) -> None:
    """Compare the rows that a run was trained on with those that it sampled.

    By length, difficulty, taskset, lag, finish reason, source and engine; with what filters,
    freshness and truncation removed. Without a bias it has no findings.
    """
    found = heavy("audits.bias").bias(open_store(store, at=at), run)
    if as_json:
        print_json(vars(found))
        return
    _print(found.findings, "the rows trained on differ from those sampled in nothing", found.facts)
    _print_table("trained draws a row, by bin", found.bins)


@commands.command()
def drop(
    run: RunOption,
    steps: Annotated[str, option("Ask about these steps, such as 20:39.", metavar="A:B")],
    against: Annotated[str, option("Compare them with these steps.", metavar="C:D")],
    store: StoreOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain how the mean reward changed between two ranges of steps.

    The change is split over tasksets, tasks, reward parts, lengths, finish reasons, lags, versions
    and sources; the shares of each split add up to the whole.
    """
    audit = heavy("audits.drop")
    ranges = audit.parse_steps(steps, "--steps"), audit.parse_steps(against, "--against")
    found = audit.drop(open_store(store, at=at), run, *ranges)
    if as_json:
        print_json(vars(found))
        return
    first, second = found.reward_mean
    whole = (
        f"mean reward {first:.4f} -> {second:.4f}: {found.change:+.4f} "
        f"(95 %: {found.low:+.4f} to {found.high:+.4f}, p {found.p:.2g})"
    )
    _print(found.findings, "the change is within chance: nothing explains it", [whole])
    _print_table("what the change is made of", found.splits)


def _print(findings: Sequence[str], silent: str, facts: Sequence[str]) -> None:
    for finding in findings:
        print(f"- {finding}")
    if not findings:
        print(silent)
    if facts:
        print_heading("facts")
        for fact in facts:
            print(fact)


def _print_table(heading: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        print_heading(heading)
        print_rows(list(rows[0]), [list(row.values()) for row in rows])
