"""The command that moves rows from files into the store: import."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .app import ROWS, JsonOption, StoreOption, app, open_store
from .tables import counted, print_json, screen

if TYPE_CHECKING:
    from ...store import Store
    from ...store.files import Imported, InputFile, Rejected

_SHOWN_EVERY = 0.2
"""Seconds between two updates of the progress line."""
_REASONS = 5
"""So many reasons are printed; the file has all."""

IMPORT_FORMATS = """\b
Kinds of file, told by the suffix:
  jsonl        lines of JSON objects
  json         objects, in a list or one after the other
  csv          comma, semicolon or tab separated
  parquet      Parquet
  arrow        Arrow IPC, file or stream; Feather
  hf           a folder that Hugging Face datasets saved with save_to_disk

\b
Formats that name our columns, most told by the file's columns:
  chat         OpenAI's {"messages", "tools"}, or {"request", "response"} of chat completions
  preferences  {"prompt", "chosen", "rejected"}, text or messages, as TRL has them
  sharegpt     {"conversations": [{"from": "human", "value": ...}], "system"}
  trl          completions_*.parquet of TRL's GRPOTrainer with log_completions
  verl         rollout dumps of verl (rollout_data_dir): input, output, gts, score, step
  tokens       prompt_ids and completion_ids (or response_ids), with logprobs of the response
  trinity      the SQL buffer of Trinity-RFT (SQLite); its pickles are not run
  gsm8k        {"question", "answer"} of GSM8K
"""


@app.command("import", rich_help_panel=ROWS, epilog=IMPORT_FORMATS)
def import_(
    table: Annotated[
        Literal["tasks", "experiences", "preferences", "values"],
        typer.Argument(help="What the rows are; values are of stored tasks or experiences."),
    ],
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Files, or a dataset's folder; see below."),
    ],
    store: StoreOption = None,
    sql: Annotated[
        str | None,
        typer.Option(
            metavar="SELECT",
            help="Map the columns of the table `input` to ours; may join the store's tables. "
            '"SELECT question AS prompt_text, answer FROM input".',
        ),
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="One of those below, when the file does not tell.")
    ] = None,
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Leave out and write down lines and rows that are wrong."),
    ] = False,
    rejected: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where `--skip-bad` writes them, with the reasons; else NAME.rejected.jsonl here.",
            show_default=False,
        ),
    ] = None,
    glob: Annotated[
        bool, typer.Option("--glob", help="FILEs are patterns such as 'logs/*.jsonl.gz'.")
    ] = False,
    each: Annotated[
        bool, typer.Option("--each", help="Each file is an import of its own; else all are one.")
    ] = False,
    taskset: Annotated[
        str | None, typer.Option(help="The tasks' set, else the file's name.", show_default=False)
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="The tasks' split, else train; of a folder with splits, which one.",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Make tokens of rows of text with this model's tokenizer and chat template; "
            "else the trainer does when it draws them.",
        ),
    ] = None,
    replace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|LINEAGE_ID",
            help="Take the place of what an earlier import of this name, or id, added.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="What values are called, of a file with one column of them."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Import rows of files: all rows of all files or, when one is wrong, none.

    Columns are named like ours (see `rlake tables tasks`), or the format says what they are; ids,
    messages, groups and the tasks of experiences are filled in. Token ids and log-probs that a file
    has are kept as they are. A second import of the same file adds nothing; one with another
    mapping adds its rows beside, unless it is to `--replace` what came before. A file of `values`
    has `experience_id` or `task_id`, and one column a value, or `name` and `value`.
    Files that end on .gz, .zst or .bz2 are read as what they hold.
    """
    from ...store.files import import_rows, import_values

    _check_values(table, name, given=taskset or tokenizer or format or skip_bad)
    if tokenizer is not None:
        from ..models.chat_tokenizer import load_tokenizer

        made = load_tokenizer(tokenizer)
    else:
        made = None
    found = _matching(files) if glob else files
    message = []
    for together in [[file] for file in found] if each or table == "values" else [found]:
        what = _named(together)
        with progress_of(f"importing {what}") as progress, ExitStack() as opened:
            for file in together:
                _check_named(table, file, format, taskset, split)
            bad = _rejected(rejected, together, message) if skip_bad else None
            sources = _opened(opened, together, format, bad, split)
            if table == "values":
                lake, [source] = open_store(store), sources
                done = import_values(lake, source, name=name, sql=sql, replace=replace)
            else:
                lake = _open_or_make(store, lambda opened=sources: _check_all(table, opened, sql))
                done = import_rows(
                    lake,
                    table,
                    sources,
                    sql=sql,
                    taskset=taskset,
                    split=split,
                    tokenizer=made,
                    replace=replace,
                    progress=progress,
                )
        names = {"file": what} if len(together) == 1 else {"files": [str(f) for f in together]}
        lost = {"rejected_to": str(bad.path)} if bad and bad.why else {}
        message.append(vars(done) | names | lost | {"store": lake.uri})
        if not as_json:
            _say(done, what, lake.uri, bad)
    if as_json:
        print_json(message[0] if len(message) == 1 else {"files": message})


def _matching(patterns: Sequence[Path]) -> list[Path]:
    """Return the files that patterns fit, each once, in the order of their names."""
    from glob import glob

    from ...store.errors import InputError

    found: dict[str, None] = {}
    for pattern in patterns:
        fitting = sorted(glob(str(pattern), recursive=True))  # noqa: PTH207 - patterns may be absolute
        if not fitting:
            raise InputError(f"no file fits `{pattern}`; nothing was imported")
        found |= dict.fromkeys(fitting)
    return [Path(name) for name in found]


def _named(files: Sequence[Path]) -> str:
    more = f" and {counted(len(files) - 1, 'more file')}" if len(files) > 1 else ""
    return f"{files[0]}{more}"


def _rejected(given: Path | None, files: Sequence[Path], before: Sequence[object]) -> "Rejected":
    """Return what takes lines and rows that are wrong; each import has a file of its own."""
    from ...store.files import Rejected

    if given is not None and before:
        return Rejected(given.with_name(f"{given.stem}-{len(before) + 1}{given.suffix}"))
    return Rejected(given or Path(f"{files[0].name}.rejected.jsonl"))


def _opened(
    stack: ExitStack,
    files: Sequence[Path],
    format: str | None,
    rejected: "Rejected | None",
    split: str | None,
) -> "list[InputFile]":
    from ...store.files import open_input

    return [
        stack.enter_context(open_input(file, format=format, rejected=rejected, split=split))
        for file in files
    ]


def _check_all(table: str, files: "Sequence[InputFile]", sql: str | None) -> None:
    from ...store.files import check_select

    for file in files:
        check_select(table, file, sql=sql)


def _check_values(table: str, name: str | None, *, given: object) -> None:
    """Refuse options that are for values, or for rows, where there are none."""
    from ...store.errors import ConfigError

    if name is not None and table != "values":
        raise ConfigError(f"`--name` is for values, and {table} have none")
    if table == "values" and given:
        raise ConfigError(
            "`--taskset`, `--tokenizer`, `--format` and `--skip-bad` are for rows, not for values"
        )


def _check_named(
    table: str, file: Path, format: str | None, taskset: str | None, split: str | None
) -> None:
    """Refuse options that are for tasks where there are none."""
    from ...store.errors import ConfigError

    names_tasks = taskset or (split and not file.is_dir())
    if table == "preferences" and names_tasks and format != "preferences":
        raise ConfigError(
            "`--taskset` and `--split` are for tasks; preferences have none, but those of "
            "`--format preferences` bring theirs"
        )


def _say(done: "Imported", file: str, place: str, rejected: "Rejected | None") -> None:
    """Print what an import did."""
    more = [counted(done.experiences, "experience")] if done.experiences else []
    more += [f"{counted(done.tasks, 'task')} that they tried"] if done.tasks else []
    also = "".join(f", and {part}" for part in more)
    named = f", read as {done.format}," if done.format else ""
    undo = f"; `rlake undo {done.lineage_id}` takes it back" if done.lineage_id else ""
    what = f"{counted(done.rows, _kind(done.table))}{also} from {file}{named} into {place}"
    print(f"imported {what}{undo}")
    if done.already:
        print(f"there already: {counted(done.already, 'row')}")
    if rejected is not None and rejected.why:
        common = dict(rejected.why.most_common(_REASONS))
        say_counts("left out as wrong", common)
        print(f"all {counted(done.skipped, 'wrong row')}, with the reasons, are in {rejected.path}")
    say_counts("left out", done.left_out)
    say_counts("not read", done.not_read)
    if done.tokenized:
        print(f"tokenized: {counted(done.tokenized, 'row')}")
    say_counts("left as text", done.untokenized)
    if done.replaced:
        print(f"replaced: {', '.join(done.replaced)}")
    say_counts("cannot be trained on", done.untrainable)


def _kind(table: str) -> str:
    return "value" if table in ("experience_values", "task_values") else table[:-1]


def say_counts(what: str, counts: Mapping[str, int]) -> None:
    """Print a line for each reason, with the number of rows."""
    for reason, n in counts.items():
        print(f"{what}: {counted(n, 'row')} ({reason})")


@contextmanager
def progress_of(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show on a terminal what is done, for how many rows and bytes, and how fast."""
    begun: dict[str, float] = {}
    shown = 0.0
    with screen(stderr=True).status(what) as status:

        def tell(doing: str, rows: int, nbytes: int) -> None:
            nonlocal shown
            now = monotonic()
            seconds = now - begun.setdefault(doing, now)
            if now - shown < _SHOWN_EVERY:
                return
            shown = now
            rate = f", {nbytes / 1e6 / seconds:,.1f} MB/s" if seconds else ""
            status.update(f"{what}: {doing}, {rows:,} rows, {nbytes / 1e6:,.0f} MB{rate}")

        yield tell


def _open_or_make(place: str, check: Callable[[], None]) -> "Store":
    """Open the store; make it only when the import into it passes a check."""
    from ...store.errors import NotAStoreError

    try:
        return open_store(place)
    except NotAStoreError:
        check()
    return open_store(place, create=True)
