"""Commands that run pipelines: pipeline run, watch, explain, memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import PIPELINES, AtOption, JsonOption, StoreOption, app, open_store
from .tables import counted, print_json, print_rows, screen

if TYPE_CHECKING:
    from ...pipelines.report import Progress, Report

commands = typer.Typer(help="Run a pipeline of operators, follow the store, or say what it does.")
app.add_typer(commands, name="pipeline", rich_help_panel=PIPELINES, no_args_is_help=True)

FileArgument = Annotated[Path, typer.Argument(help="The pipeline's YAML file.")]
FullOption = Annotated[
    bool, typer.Option("--full", help="Read everything, also what was treated before.")
]
ExecutorOption = Annotated[
    str | None,
    typer.Option(metavar="local|ray", help="Where it runs; None: as the file says, else local."),
]


@commands.command()
def run(
    file: FileArgument,
    store: StoreOption = None,
    at: AtOption = None,
    full: FullOption = False,
    executor: ExecutorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a pipeline once: rows in, operators, rows out, one row of lineage.

    It reads what came since it last ran with the same source, operators and sink. With `--at` it
    reads the store as it was; what it makes is appended to the store as it is.
    """
    from ...pipelines import Pipeline
    from ...pipelines.report import check_read

    pipeline = Pipeline.from_yaml(file)
    how = {} if executor is None else {"executor": executor}
    with _drawn(file.stem) as listener:
        lake = open_store(store)
        report = pipeline.run(lake, at=at, full=full, listener=listener, **how)
    check_read(report, lake)
    _print(report, as_json=as_json)


@commands.command()
def watch(
    file: FileArgument,
    store: StoreOption = None,
    until_idle: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="End when nothing came for so long."),
    ] = None,
    executor: ExecutorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a pipeline now, and whenever its source gets rows, until Ctrl-C; a line for each run."""
    from ...pipelines import Pipeline, watch

    pipeline = Pipeline.from_yaml(file)
    how: dict[str, Any] = {} if executor is None else {"executor": executor}
    runs = 0
    try:
        for report in watch(pipeline, open_store(store), until_idle=until_idle, **how):
            runs += 1
            _print(report, as_json=as_json, short=True)
    except KeyboardInterrupt:
        screen(stderr=True).print(f"{pipeline.name}: stopped after {counted(runs, 'run')}")


@commands.command()
def explain(
    file: FileArgument, store: StoreOption = None, at: AtOption = None, as_json: JsonOption = False
) -> None:
    """Say what a pipeline would do, operator by operator; nothing is written.

    Columns read and written, what each operator sees, rows expected by earlier runs, costs so far,
    answers remembered, and the rows that a run would read now.
    """
    from ...pipelines import Pipeline
    from ...store.errors import NotAStoreError

    pipeline = Pipeline.from_yaml(file)
    try:
        lake = open_store(store, at=at)
    except NotAStoreError:
        if at is not None:
            raise
        lake = None  # a plan needs no store; with one, its rows are looked at too
    if as_json and lake is not None:
        from ...pipelines.explain import explained

        pipeline.explain(lake)  # its checks
        found = explained(pipeline, pipeline.plan(), lake)
        told = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "plan"}
        print_json(told | {"steps": [asdict(step) for step in found.steps]})
    else:
        print(pipeline.explain(lake))


@commands.command()
def memory(
    store: StoreOption = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Forget all of it: it is worked out again when needed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what is remembered of costly operators, the oldest first, or forget it."""
    from ...pipelines.cache_tables import CacheTables

    memories = CacheTables(open_store(store))
    there = memories.listed()
    if clear:
        memories.clear()
    if as_json:
        print_json({"memories": [asdict(m) for m in there], "is_cleared": clear})
        return
    size = sum(m.num_bytes for m in there)
    if there and not clear:
        print_rows(
            ("operator", "answers", "bytes", "written_at", "key"),
            [(m.operator, m.rows, m.num_bytes, m.written_at, m.key) for m in there],
        )
    what = "forgot" if clear else "remembered:"
    print(f"{what} {counted(sum(m.rows for m in there), 'answer')}, {size / 2**20:.1f} MiB")


def _print(report: "Report", *, as_json: bool, short: bool = False) -> None:
    if as_json:
        print_json({k: v for k, v in asdict(report).items() if k != "rows"})
    else:
        print(str(report).splitlines()[0] if short else report, flush=True)


@contextmanager
def _drawn(name: str) -> Iterator[Callable[["Progress"], None]]:
    """Draw a bar on the terminal: rows, rows a second, and what was dropped most, and why."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
    )
    console = screen(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None, told="")

        def draw(now: "Progress") -> None:
            stage = f"{name} {now.stage}/{now.stages}" if now.stages > 1 else name
            bar.update(
                task,
                description=stage,
                total=now.rows,
                completed=now.treated,
                told=told(now),
            )

        yield draw


def told(now: "Progress") -> str:
    """Return the speed of a run, and what it dropped so far, the most frequent reason first."""
    words = [f"{now.rows_per_second:,.0f} rows/s"]
    if now.dropped:
        from ...pipelines.report import summed

        most, dropped = summed(now.dropped)[0], sum(d.rows for d in now.dropped)
        words.append(f"{dropped:,} dropped, most by {most.operator}: {most.reason}")
    if now.failed:
        words.append(f"{now.failed:,} failed")
    return "; ".join(words)
