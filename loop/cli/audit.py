"""The commands `audit`: questions that a run's stored history answers."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from .app import (
    PROOF,
    AtOption,
    JsonOption,
    StoreOption,
    WhereOption,
    app,
    heavy,
    open_store,
    option,
)
from .tables import counted, print_heading, print_json, print_rows

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


@commands.command()
def oddities(
    run: RunOption, store: StoreOption = None, at: AtOption = None, as_json: JsonOption = False
) -> None:
    """Look for signs of reward hacking, and for odd texts.

    A score, a judge, people or a part that did not follow the reward; length that is rewarded;
    repeated texts, other scripts, empty thoughts, answers outside the tags, groups that agree on a
    wrong answer.
    """
    found = heavy("audits.oddities").oddities(open_store(store, at=at), run)
    if as_json:
        print_json(vars(found))
        return
    _print(found.findings, f"nothing is odd in {found.num_rows:,} rows", [])
    _print_table("other judgments of the same rows", found.judgments)
    _print_table("share of rows (of groups) in both halves", found.odd)


@commands.command("off-policy")
def off_policy(
    run: RunOption,
    target: Annotated[
        str | None,
        option(
            "Estimate the policy of these log-probs: teacher_logprobs, or a side column such as "
            "derived:NAME with a row's sum.",
            metavar="COLUMN",
        ),
    ] = None,
    weight: Annotated[
        str | None,
        option("Estimate a rule that keeps rows: \"finish_reason = 'stop'\".", metavar="SQL"),
    ] = None,
    reward: Annotated[
        str | None,
        option("Use this side column as the reward, such as score:strict@2.", metavar="COLUMN"),
    ] = None,
    where: WhereOption = None,
    store: StoreOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> int:
    """Estimate what another policy, or a rule, would have earned on the logged rollouts.

    By importance sampling, with the effective number of rows; exits with 1 where it is too small.
    """
    found = heavy("audits.off_policy").off_policy(
        open_store(store, at=at), run, target=target, weight=weight, reward=reward, where=where
    )
    values = [vars(value) for value in found.values]
    if as_json:
        print_json(vars(found) | {"values": values})
        return int(found.refusal is not None)
    _print(found.findings, f"not estimated: {found.refusal}" if found.refusal else "", [])
    _print_table(f"mean reward of {found.target}", values)
    print(
        f"{counted(found.num_rows, 'row')} of {counted(found.num_tasks, 'task')}, worth "
        f"{found.effective_rows:.1f}; left out: {counted(found.num_left_out, 'row')}, "
        f"{counted(found.num_without_support, 'task')} without support"
    )
    return int(found.refusal is not None)


@commands.command()
def value(
    run: RunOption,
    against: Annotated[
        list[str] | None,
        option("Compare this run, which leaves out a source; may be given again.", metavar="NAME"),
    ] = None,
    store: StoreOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rank the rows that moved a run's policy most, and compare runs that left out a source.

    The push of a row is |weight x advantage| times the sum of 1 - p over its sampled tokens.
    """
    audit = heavy("audits.value")
    found = audit.value(open_store(store, at=at), run, against=against or ())
    if as_json:
        print_json(vars(found))
        return
    _print(found.findings, "no kind of rows moved the policy more than others", found.facts)
    _print_table("push, by bin", found.bins)
    _print_table("draws with the largest push", found.top)
    _print_table("runs without a source", found.comparisons)


def _print(findings: Sequence[str], silent: str, facts: Sequence[str]) -> None:
    for finding in findings:
        print(f"- {finding}")
    if not findings and silent:
        print(silent)
    if facts:
        print_heading("facts")
        for fact in facts:
            print(fact)


def _print_table(heading: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        print_heading(heading)
        names = list(rows[0])
        # by name: rows that were made in different ways have their keys in different orders
        print_rows(names, [[row[name] for name in names] for row in rows])
