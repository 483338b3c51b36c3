"""Commands about rewards: rescore stored rows, list rewards, and what another one changes."""

from typing import Annotated, Any

import typer

from .app import ROWS, JsonOption, StoreOption, app, open_store
from .tables import counted, print_heading, print_json, print_rows, screen

commands = typer.Typer(help="The rewards there are, and what changes from one to another.")
app.add_typer(commands, name="rewards", rich_help_panel=ROWS, no_args_is_help=True)

WhereOption = Annotated[
    str | None, typer.Option(help="Which experiences, in SQL: \"run_id = 'a'\"; else all.")
]


@app.command(rich_help_panel=ROWS)
def rescore(
    reward: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="A reward of ours, or package.module:function; as YAML, with its parameters: "
            "'overlong: {max_tokens: 512, cache: 128}'.",
        ),
    ],
    store: StoreOption = None,
    version: Annotated[
        str | None,
        typer.Option(help="What to call this state of it, else a digest of its source."),
    ] = None,
    where: WhereOption = None,
    at_once: Annotated[
        int, typer.Option(min=1, help="Calls of an async reward that are under way at once.")
    ] = 16,
    seconds: Annotated[
        float, typer.Option(min=0.001, help="Longest time of one call of an async reward.")
    ] = 300.0,
    compare: Annotated[
        str | None,
        typer.Option(metavar="OLD", help="Then say what changes: from `reward`, or score:NAME@V."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Judge stored rows by a reward function; its verdicts are rows of `scores`.

    Rows that it has judged before are passed over, so a call that was killed is gone on with. A run
    trains on what it says when `trainer.side_columns` lists `reward=score:NAME@VERSION`.
    """
    from ...pipelines.rescoring import rescore as judge
    from ...pipelines.reward_diff import compare as compared
    from ...store.errors import JobError

    lake = open_store(store)
    with screen(stderr=True).status("judging") as shown:
        done = judge(
            lake,
            _spec(reward),
            version=version,
            where=where,
            at_once=at_once,
            seconds=seconds,
            listener=lambda n, all_: shown.update(f"judged {n:,} of {counted(all_, 'row')}"),
        )
    if not done.rows:
        at = f" matches `--where` {where}" if where else " is stored"
        raise JobError(f"nothing was judged: no experience{at}")
    if done.failed == done.rows:
        raise JobError(
            f"`{done.scorer}` could judge none of {counted(done.rows, 'row')}, such as: "
            f"{done.failure}; mend it and judge again, with another `--version` if you name them"
        )
    made = f"score:{done.scorer}@{done.version}"
    change = compared(lake, compare, made, where=where) if compare else None
    if as_json:
        print_json(vars(done) | ({"difference": vars(change)} if change else {}))
        return
    before = f" ({done.rows - done.new:,} before)" if done.rows > done.new else ""
    print(f"{done.scorer}@{done.version} judged {counted(done.rows, 'row')}{before}")
    share = done.changed / done.rows
    print(
        f"against the stored reward: {done.changed:,} changed ({share:.1%}), "
        f"{done.better:,} higher, {done.worse:,} lower"
    )
    print(f"mean: {_mean(done.reward_mean)} stored, {_mean(done.value_mean)} now")
    if done.failed:
        print(f"could not be judged: {counted(done.failed, 'row')}, such as: {done.failure}")
    print(f"read it as `{made}`")
    if change:
        _print(change)


@commands.command("list")
def list_rewards(as_json: JsonOption = False) -> None:
    """List our rewards: what each looks at, its parameters, and what it says."""
    import inspect

    from ...operators import rewards
    from ...operators.reward_protocol import looks_at
    from ...operators.sandbox import protection
    from ..config.resolve import public_functions

    found = {
        name: {
            "looks_at": looks_at(function),
            "parameters": list(inspect.signature(function).parameters)[2:],
            "says": (inspect.getdoc(function) or "").partition("\n")[0],
        }
        for name, function in sorted(public_functions(rewards).items())
    }
    if as_json:
        print_json(found)
        return
    print_rows(
        ["name", "looks_at", "parameters", "says"],
        [
            (name, one["looks_at"], " ".join(one["parameters"]), one["says"])
            for name, one in found.items()
        ],
    )
    print(f"code under test is confined here by {protection()}")


@commands.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="`reward`, or score:NAME@VERSION.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Likewise.")],
    store: StoreOption = None,
    where: WhereOption = None,
    tasks: Annotated[int, typer.Option(min=0, help="Tasks shown that change most.")] = 10,
    rows: Annotated[int, typer.Option(min=0, help="Rows shown that change most.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Say what changes from one reward to another: rows, groups that change sign, tasks."""
    from ...pipelines.reward_diff import changed_rows, compare

    lake = open_store(store)
    change = compare(lake, a, b, where=where, tasks=tasks)
    most = changed_rows(lake, a, b, where=where, limit=rows) if rows else None
    if as_json:
        print_json(vars(change) | ({} if most is None else {"most": most.to_dicts()}))
        return
    _print(change)
    if most is not None:
        print_heading("rows that change most")
        names = ["experience_id", "a", "b", "prompt_text", "response_text"]
        print_rows(names, most.select(names).rows())


def _print(change: Any) -> None:
    rows, groups = change.rows, change.groups
    print_heading(f"from A = {change.a} to B = {change.b}")
    print(
        f"{counted(rows['rows'], 'row')}: {rows['both']:,} have both, {rows['changed']:,} change, "
        f"{rows['higher']:,} rise, {rows['lower']:,} fall"
    )
    print(
        f"mean of rows with both: {_mean(rows['a_mean'])} -> {_mean(rows['b_mean'])}, "
        f"correlation {_mean(rows['correlation'])}"
    )
    print(
        f"{counted(groups['groups'], 'group')}: in {groups['sign_changes']:,} an advantage changes "
        f"its sign ({counted(groups['rows_of_other_sign'], 'row')}), in {groups['other_best']:,} "
        f"other tries are best, {groups['become_flat']:,} become flat, "
        f"{groups['become_informative']:,} become informative"
    )
    _print_confusion(change.confusion)
    if change.tasks:
        print_heading("tasks that change most")
        print_rows(list(change.tasks[0]), [list(task.values()) for task in change.tasks])


def _print_confusion(cells: Any) -> None:
    seconds = list(dict.fromkeys(cell["b"] for cell in sorted(cells, key=lambda c: _order(c["b"]))))
    firsts = list(dict.fromkeys(cell["a"] for cell in cells))
    counts = {(cell["a"], cell["b"]): cell["rows"] for cell in cells}
    print_heading("rows by A (down) and B (across)")
    print_rows(
        ["A", *(f"B {name}" for name in seconds)],
        [(name, *(counts.get((name, other), 0) for other in seconds)) for name in firsts],
    )


def _order(name: str) -> tuple[int, float, str]:
    try:
        return 1, float(name), name
    except ValueError:
        return (0 if name == "NULL" else 2), 0.0, name


def _spec(text: str) -> Any:
    """Read a reward as YAML: a name, or a name with its parameters."""
    from ...store.errors import ConfigError
    from ...store.files.yaml_text import parse_yaml

    spec = parse_yaml(text, f"`--reward {text}`")
    if isinstance(spec, str) or (
        isinstance(spec, dict) and all(isinstance(v, dict | None) for v in spec.values())
    ):
        return spec
    raise ConfigError(f"`--reward` is a name, or `{{name: {{parameter: value}}}}`, got `{text}`")


def _mean(value: float | None) -> str:
    return "NULL" if value is None else f"{value:.4g}"
