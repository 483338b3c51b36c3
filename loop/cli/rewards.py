"""The commands `rescore`, `rewards list` and `rewards diff`."""

from typing import Annotated, Any

import typer

from ...store.errors import ConfigError, JobError
from .app import (
    ROWS,
    JsonOption,
    StoreOption,
    WhereOption,
    app,
    argument,
    heavy,
    open_store,
    option,
)
from .tables import (
    counted,
    document,
    number,
    parameters_of,
    print_heading,
    print_json,
    print_rows,
    render,
    screen,
)

commands = typer.Typer(help="List rewards, and compare two of them on stored rows.")
app.add_typer(commands, name="rewards", rich_help_panel=ROWS, no_args_is_help=True)


@app.command(rich_help_panel=ROWS)
def rescore(
    reward: Annotated[
        str,
        option(
            "Use this reward: a built-in name or package.module:function; with parameters as YAML, "
            "'overlong: {max_tokens: 512, cache: 128}'.",
            metavar="NAME",
        ),
    ],
    store: StoreOption = None,
    version: Annotated[
        str | None,
        option("Store the scores under this version.", default="a digest of the reward's source"),
    ] = None,
    where: WhereOption = None,
    max_concurrency: Annotated[
        int, option("Run at most this many calls of an async reward at once.", min=1)
    ] = 16,
    timeout: Annotated[
        float,
        option("Stop a call of an async reward after this long.", min=0.001, metavar="SECONDS"),
    ] = 300.0,
    compare: Annotated[
        str | None,
        option(
            "Then report what changes against `reward`, or against score:NAME@VERSION.",
            metavar="OLD",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Score stored rows with a reward function; the results are rows of `scores`.

    Rows that were scored before are skipped, so a run that was killed continues. To train on the
    new reward, add `reward=score:NAME@VERSION` to `trainer.side_columns`.
    """
    from ...pipelines.rescoring import rescore as judge
    from ...pipelines.reward_diff import compare as compared

    lake, spec = open_store(store), _spec(reward)
    if not isinstance(spec, str) and any((given or {}).get("run") for given in spec.values()):
        spec = heavy("weight_sync.run_models").resolve_reward(lake, spec)
    with screen(stderr=True).status("scoring") as shown:
        done = judge(
            lake,
            spec,
            version=version,
            where=where,
            max_concurrency=max_concurrency,
            timeout=timeout,
            listener=lambda n, all_: shown.update(f"scored {n:,} of {counted(all_, 'row')}"),
        )
    if not done.rows:
        at = f" matches `--where` {where}" if where else " is stored"
        raise JobError(f"nothing was scored: no experience{at}")
    if done.failed == done.rows:
        raise JobError(
            f"`{done.scorer}` scored none of {counted(done.rows, 'row')}, such as: "
            f"{done.failure}; fix it and rescore, with another `--version` if you set one"
        )
    made = f"score:{done.scorer}@{done.version}"
    change = compared(lake, compare, made, where=where) if compare else None
    if as_json:
        print_json(vars(done) | ({"difference": vars(change)} if change else {}))
        return
    before = f" ({done.rows - done.new:,} before)" if done.rows > done.new else ""
    print(f"{done.scorer}@{done.version} scored {counted(done.rows, 'row')}{before}")
    share = done.changed / done.rows
    print(
        f"against the stored reward: {done.changed:,} changed ({share:.1%}), "
        f"{done.better:,} higher, {done.worse:,} lower"
    )
    print(f"mean: {number(done.reward_mean)} stored, {number(done.value_mean)} now")
    if done.failed:
        print(f"could not be scored: {counted(done.failed, 'row')}, such as: {done.failure}")
    print(f"read it as `{made}`")
    if change:
        _print(change)


@commands.command("list")
def list_rewards(as_json: JsonOption = False) -> None:
    """List the built-in rewards with their inputs and parameters."""
    from ...operators import rewards
    from ...operators.import_path import public_functions
    from ...operators.reward_protocol import looks_at
    from ...operators.sandbox import protection

    found = {
        name: {
            "looks_at": looks_at(function),
            "parameters": list(parameters_of(function, skip=2)),
            "says": document(function).partition("\n")[0],
        }
        for name, function in sorted(public_functions(rewards).items())
    }
    listed = [
        {"name": name, **one, "parameters": " ".join(one["parameters"])}
        for name, one in found.items()
    ]
    render(found, listed, as_json=as_json)
    if not as_json:
        print(f"code under test is confined here by {protection()}")


@commands.command()
def diff(
    a: Annotated[str, argument("Compare from `reward`, or from score:NAME@VERSION.", metavar="A")],
    b: Annotated[str, argument("Compare to `reward`, or to score:NAME@VERSION.", metavar="B")],
    store: StoreOption = None,
    where: WhereOption = None,
    tasks: Annotated[int, option("Show this many tasks that change most.", min=0)] = 10,
    rows: Annotated[int, option("Show this many rows that change most.", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare two rewards: which rows, group advantages and tasks change."""
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
        f"mean of rows with both: {number(rows['a_mean'])} -> {number(rows['b_mean'])}, "
        f"correlation {number(rows['correlation'])}"
    )
    print(
        f"{counted(groups['groups'], 'group')}: in {groups['sign_changes']:,} an advantage changes "
        f"its sign ({counted(groups['rows_of_other_sign'], 'row')}), in {groups['other_best']:,} "
        f"other rollouts are best, {groups['become_flat']:,} become flat, "
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
    from ...store.files.yaml_text import parse_yaml

    spec = parse_yaml(text, f"`--reward {text}`")
    if isinstance(spec, str) or (
        isinstance(spec, dict) and all(isinstance(v, dict | None) for v in spec.values())
    ):
        return spec
    raise ConfigError(
        f"`--reward` must be a name or `{{name: {{parameter: value}}}}`, got `{text}`"
    )
