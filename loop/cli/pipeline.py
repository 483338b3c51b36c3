"""The commands `pipeline run`, `watch`, `explain` and `cache`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...store.errors import NotAStoreError
from .app import PIPELINES, AtOption, JsonOption, StoreOption, app, argument, open_store, option
from .tables import counted, print_json, print_rows, screen

if TYPE_CHECKING:
    from ...pipelines.report import Progress, Report

commands = typer.Typer(help="Run pipelines of operators, once or continuously, and explain them.")
app.add_typer(commands, name="pipeline", rich_help_panel=PIPELINES, no_args_is_help=True)

FileArgument = Annotated[Path, argument("Read the pipeline from this YAML file.")]
FullOption = Annotated[bool, option("Read all rows, including those processed before.", "--full")]
ExecutorOption = Annotated[
    str | None,
    option("Run on this executor.", metavar="local|ray", default="the file's, else local"),
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
    """Run a pipeline once.

    It reads the rows that arrived since it last ran with the same source, operators and sink. With
    `--at` it reads the store as it was at a snapshot, and appends to the store as it is.
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
        float | None, option("Stop when no rows arrive for this long.", metavar="SECONDS", min=0)
    ] = None,
    executor: ExecutorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a pipeline now and whenever its source gets rows, until Ctrl-C; print a line per run."""
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
    """Explain what a pipeline would do, operator by operator; nothing is written.

    Prints the columns read and written, the scope of each operator, expected rows, costs so far,
    cached results, and the rows that a run would read now.
    """
    from ...pipelines import Pipeline

    pipeline = Pipeline.from_yaml(file)
    try:
        lake = open_store(store, at=at)
    except NotAStoreError:
        if at is not None:
            raise
        lake = None  # a plan works without a store; with one, it counts rows
    if as_json and lake is not None:
        from ...pipelines.explain import explained

        pipeline.explain(lake)  # its checks
        found = explained(pipeline, pipeline.plan(), lake)
        record = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "plan"}
        print_json(record | {"steps": [asdict(step) for step in found.steps]})
    else:
        print(pipeline.explain(lake))


@commands.command()
def cache(
    store: StoreOption = None,
    clear: Annotated[
        bool, option("Delete all cached results; they are computed again when needed.", "--clear")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the cached results of costly operators, oldest first, or delete them."""
    from ...pipelines.cache_tables import CacheTables

    cached = CacheTables(open_store(store))
    there = cached.listed()
    if clear:
        cached.clear()
    if as_json:
        print_json({"caches": [asdict(m) for m in there], "is_cleared": clear})
        return
    size = sum(m.num_bytes for m in there)
    if there and not clear:
        print_rows(
            ("operator", "results", "bytes", "written_at", "key"),
            [(m.operator, m.rows, m.num_bytes, m.written_at, m.key) for m in there],
        )
    what = "deleted" if clear else "cached:"
    print(f"{what} {counted(sum(m.rows for m in there), 'result')}, {size / 2**20:.1f} MiB")


def _print(report: "Report", *, as_json: bool, short: bool = False) -> None:
    if as_json:
        print_json({k: v for k, v in asdict(report).items() if k != "rows"})
    else:
        print(str(report).splitlines()[0] if short else report, flush=True)


@contextmanager
def _drawn(name: str) -> Iterator[Callable[["Progress"], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
    )
    console = screen(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None, status="")

        def draw(now: "Progress") -> None:
            stage = f"{name} {now.stage}/{now.stages}" if now.stages > 1 else name
            bar.update(
                task, description=stage, total=now.rows, completed=now.treated, status=status(now)
            )

        yield draw


def status(now: "Progress") -> str:
    """Return the speed of a run, and its most frequent reason for dropping rows."""
    words = [f"{now.rows_per_second:,.0f} rows/s"]
    if now.dropped:
        from ...pipelines.report import summed

        most, dropped = summed(now.dropped)[0], sum(d.rows for d in now.dropped)
        words.append(f"{dropped:,} dropped, most by {most.operator}: {most.reason}")
    if now.failed:
        words.append(f"{now.failed:,} failed")
    return "; ".join(words)
