"""The command `import`: read rows of files into the store."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Literal

from ...store.decode_image import MOST_PIXELS
from ...store.errors import ConfigError
from ...store.media import ImageLimits
from .app import ROWS, JsonOption, StoreOption, app, argument, heavy, open_store, option
from .tables import counted, print_json, screen

if TYPE_CHECKING:
    from ...store.files import Imported, InputFile, Rejected

_SHOWN_EVERY = 0.2
"""Seconds between two updates of the progress line."""
_REASONS = 5
"""Most reasons to print; the file has all."""

SqlOption = Annotated[
    str | None,
    option(
        "Map the columns of the table `input` to those of the store, whose tables may be "
        'joined: "SELECT question AS prompt_text, answer FROM input".',
        metavar="SELECT",
    ),
]
RejectedOption = Annotated[
    Path | None,
    option(
        "Write what `--skip-invalid` skips, and why, to this file.",
        metavar="FILE",
        default="NAME.rejected.jsonl",
    ),
]
SplitOption = Annotated[
    str | None,
    option(
        "Put the tasks into this split, or read this split of a dataset's folder.", default="train"
    ),
]
TokenizerOption = Annotated[
    Path | None,
    option(
        "Tokenize text with this model's tokenizer and chat template.",
        metavar="FOLDER",
        default="the trainer tokenizes what it draws",
    ),
]
ReplaceOption = Annotated[
    str | None,
    option(
        "Replace what an earlier import of this file name or lineage ID added.",
        metavar="FILE|LINEAGE_ID",
        default=False,
    ),
]

ImagesOption = Annotated[
    Path | None,
    option(
        "Read the paths of images in this folder, and none outside of it.",
        metavar="FOLDER",
        default="the file's folder",
    ),
]

IMPORT_FORMATS = """\b
File types, by suffix:
  jsonl        lines of JSON objects
  json         objects, in a list or one after the other
  csv          comma, semicolon or tab separated
  parquet      Parquet
  arrow        Arrow IPC, file or stream; Feather
  hf           a folder that Hugging Face datasets saved with save_to_disk, or loads

\b
Addresses, copied before they are read:
  hf://OWNER/NAME[@REVISION][#CONFIG]           a dataset of the Hugging Face hub
  modelscope://OWNER/NAME[@REVISION][#CONFIG]   one of ModelScope's
  postgresql://USER:PASSWORD@HOST/DATABASE#TABLE  a table, or a SELECT in its place
  sqlite:///FILE#TABLE                          the same of an SQLite file

\b
Formats, most of them detected from the file's columns:
  chat         OpenAI's {"messages", "tools"}, or {"request", "response"} of chat completions
  preferences  {"prompt", "chosen", "rejected"}, text or messages, as TRL has them
  sharegpt     {"conversations": [{"from": "human", "value": ...}], "system"}
  trl          completions_*.parquet of TRL's GRPOTrainer with log_completions
  verl         rollout dumps of verl (rollout_data_dir): input, output, gts, score, step
  verl_tasks   data of verl's trainers, as Guru (LLM360/guru-RL-92k): prompt, reward_model
  tokens       prompt_ids and completion_ids (or response_ids), with logprobs of the response
  trinity      the SQL buffer of Trinity-RFT (SQLite); its pickles are not run
  gsm8k        {"question", "answer"} of GSM8K
"""


@app.command("import", rich_help_panel=ROWS, epilog=IMPORT_FORMATS)
def import_(
    table: Annotated[
        Literal["tasks", "experiences", "preferences", "values"],
        argument("Import rows of this kind; `values` belong to stored tasks or experiences."),
    ],
    files: Annotated[
        list[str],
        argument(
            "Read these files, a dataset's folder, or an address; see below.", metavar="FILE..."
        ),
    ],
    store: StoreOption = None,
    sql: SqlOption = None,
    format: Annotated[
        str | None, option("Read the files in this format; see below.", default="detected")
    ] = None,
    skip_invalid: Annotated[
        bool, option("Skip invalid lines and rows, and write them to a file.", "--skip-invalid")
    ] = False,
    rejected: RejectedOption = None,
    glob: Annotated[
        bool, option("Treat each FILE as a pattern, such as 'logs/*.jsonl.gz'.", "--glob")
    ] = False,
    each: Annotated[
        bool, option("Import each file on its own, so that each can be undone.", "--each")
    ] = False,
    taskset: Annotated[
        str | None, option("Put the tasks into this taskset.", default="the file's name")
    ] = None,
    split: SplitOption = None,
    tokenizer: TokenizerOption = None,
    replace: ReplaceOption = None,
    images: ImagesOption = None,
    max_image_bytes: Annotated[int, option("Refuse an image of more bytes.")] = 20 << 20,
    max_image_pixels: Annotated[
        int, option("Refuse an image of more pixels, before it is decoded.", max=MOST_PIXELS)
    ] = 64 << 20,
    name: Annotated[
        str | None, option("Name the values of a file with one column of values.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Import the rows of files: all rows of all files or, when one is invalid, none.

    Columns are named like ours (see `rlake tables tasks`), or the format defines them. IDs,
    messages, groups and the tasks of experiences are filled in. Token IDs and log-probs in a file
    are kept as they are. Importing the same file again adds nothing; importing it with another
    mapping adds more rows, unless `--replace` removes the earlier ones. Images, in messages
    or in columns `images` or `image`, are stored once in the table `media`. A file of `values` has
    `experience_id` or `task_id`, and one column per value, or `name` and `value`. Files that end in
    .gz, .zst or .bz2 are decompressed.
    """
    from ...store.files import import_rows, import_values, matching, open_input, shown

    # Before a tokenizer is loaded, which takes seconds.
    _check_values(table, name, given=taskset or tokenizer or format or skip_invalid)
    made = None if tokenizer is None else heavy("models.chat_tokenizer").load_tokenizer(tokenizer)
    found = matching(files) if glob else files
    message = []
    for together in [[file] for file in found] if each or table == "values" else [found]:
        what = _named(together)
        with progress_of(f"importing {what}") as progress, ExitStack() as opened:
            for file in together:
                _check_named(table, file, format, taskset, split)
            bad = _rejected(rejected, together, message) if skip_invalid else None
            reading = partial(open_input, format=format, rejected=bad, split=split)
            sources = [opened.enter_context(reading(file)) for file in together]
            if table == "values":
                lake, [source] = open_store(store), sources
                done = import_values(lake, source, name=name, sql=sql, replace=replace)
            else:
                check = partial(_check_all, table, sources, sql)
                lake = open_store(store, create=True, check=check)
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
                    images=images,
                    limits=ImageLimits(max_image_bytes, max_image_pixels),
                )
        names = {"file": what} if len(together) == 1 else {"files": [shown(f) for f in together]}
        lost = {"rejected_to": str(bad.path)} if bad and bad.why else {}
        message.append(vars(done) | names | lost | {"store": lake.uri})
        if not as_json:
            _say(done, what, lake.uri, bad)
    if as_json:
        print_json(message[0] if len(message) == 1 else {"files": message})


def _named(files: Sequence[str]) -> str:
    from ...store.files import shown

    more = f" and {counted(len(files) - 1, 'more file')}" if len(files) > 1 else ""
    return f"{shown(files[0])}{more}"


def _rejected(given: Path | None, files: Sequence[str], before: Sequence[object]) -> "Rejected":
    """Return the file of invalid lines and rows; each import has its own."""
    from ...store.files import Rejected, shown

    # With `--each`, one file would overwrite the other.
    if given is not None and before:
        return Rejected(given.with_name(f"{given.stem}-{len(before) + 1}{given.suffix}"))
    return Rejected(given or Path(f"{Path(shown(files[0])).name}.rejected.jsonl"))


def _check_all(table: str, files: "Sequence[InputFile]", sql: str | None) -> None:
    from ...store.files import check_select

    for file in files:
        check_select(table, file, sql=sql)


def _check_values(table: str, name: str | None, *, given: object) -> None:
    """Refuse options of values for rows, and options of rows for values."""
    if name is not None and table != "values":
        raise ConfigError(f"`--name` is only for `values`, not for {table}; leave it out")
    if table == "values" and given:
        raise ConfigError(
            "values take no `--taskset`, `--tokenizer`, `--format` or `--skip-invalid`"
        )


def _check_named(
    table: str, file: str, format: str | None, taskset: str | None, split: str | None
) -> None:
    """Refuse options of tasks for preferences, which have none."""
    names_tasks = taskset or (split and not (Path(file).is_dir() or "://" in file))
    if table == "preferences" and names_tasks and format != "preferences":
        raise ConfigError(
            "`--taskset` and `--split` are for tasks, and preferences have none; leave them out, "
            "or import with `--format preferences`, which brings its tasks"
        )


def _say(done: "Imported", file: str, place: str, rejected: "Rejected | None") -> None:
    parts = [counted(done.rows, _kind(done.table))]
    parts += [counted(done.experiences, "experience")] if done.experiences else []
    parts += [counted(done.tasks, "task")] if done.tasks else []
    parts += [counted(done.images, "image")] if done.images else []
    named = f", read as {done.format}," if done.format else ""
    undo = f"; undo it with `rlake undo {done.lineage_id}`" if done.lineage_id else ""
    what = f"{' and '.join(parts)} from {file}{named} into {place}"
    print(f"imported {what}{undo}")
    if done.already:
        print(f"already stored: {counted(done.already, 'row')}")
    if rejected is not None and rejected.why:
        common = dict(rejected.why.most_common(_REASONS))
        say_counts("skipped as invalid", common)
        print(f"the rows left out are in {rejected.path}, with the reasons")
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
    """Show progress on a terminal: the phase, rows, bytes, and bytes per second."""
    begun: dict[str, float] = {}
    shown = 0.0
    with screen(stderr=True).status(what) as status:

        def show(doing: str, rows: int, nbytes: int) -> None:
            nonlocal shown
            now = monotonic()
            seconds = now - begun.setdefault(doing, now)
            # Drawing the line takes longer than reading a few rows.
            if now - shown < _SHOWN_EVERY:
                return
            shown = now
            rate = f", {nbytes / 1e6 / seconds:,.1f} MB/s" if seconds else ""
            status.update(f"{what}: {doing}, {rows:,} rows, {nbytes / 1e6:,.0f} MB{rate}")

        yield show
