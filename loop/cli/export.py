"""The command `export`: write rows to files, and weights to folders."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ...store import Store
from ...store.errors import ConfigError
from .app import ROWS, AtOption, JsonOption, StoreOption, app, argument, heavy, open_store, option
from .import_ import progress_of, say_counts
from .tables import counted, print_json, render

if TYPE_CHECKING:
    import pyarrow as pa


RunArgument = Annotated[
    str | None, argument("Export the model of this run.", metavar="[RUN]", default=False)
]
VersionOption = Annotated[
    int | None, option("For model: export this policy version.", default="the newest")
]
MergeOption = Annotated[
    bool,
    option(
        "For model: merge an adapter into its base model, or keep it separate.",
        "--merge/--no-merge",
    ),
]
FolderOption = Annotated[
    Path | None,
    option("For model: find the weights in this run folder, if the configuration sets `output`."),
]

SelectOption = Annotated[
    str | None,
    option(
        "Export the rows of this query. It returns `messages`, or `prompt_text` and "
        "`response_text`; for kto also `label`; for dpo and reward `chosen_id` and "
        "`rejected_id`.",
        metavar="SELECT",
    ),
]
LabelOption = Annotated[
    str | None,
    option(
        "For kto: label rows as desirable by this SQL condition, which sees all rows, before "
        '`--where`: "reward > avg(reward) OVER (PARTITION BY group_id)".',
        metavar="SQL",
        default='"reward > 0"',
    ),
]

_WEIGHTS = ("desirable_weight", "undesirable_weight")

EXPORT_FORMATS = """\b
What to export:
  sft          {"prompt", "completion"}: a line for each assistant turn, for TRL
  dpo          {"prompt", "chosen", "rejected"}: the pairs of `preferences`, for TRL
  reward       {"prompt", "chosen", "rejected", "margin"}: pairs for a reward model of TRL
  kto          {"prompt", "completion", "label"}: true where the reward is above 0, for TRL
  chat         {"messages", "tools"}: whole conversations, as OpenAI fine-tuning
  sharegpt     {"conversations": [{"from", "value"}], "system", "tools"}
  experiences  all columns, or those of any SELECT
  model        a run's weights, as a new folder that transformers or peft loads

\b
File formats, by the suffix of `--out`:
  .jsonl       lines of JSON; messages and tools exactly as stored
  .parquet     Parquet
  .arrow       an Arrow IPC file
  none         a folder that Hugging Face datasets opens with load_from_disk
"""


@app.command(rich_help_panel=ROWS, epilog=EXPORT_FORMATS)
def export(
    what: Annotated[
        Literal["sft", "dpo", "reward", "kto", "chat", "sharegpt", "experiences", "model"],
        argument("Export rows in this format, or a model; see below."),
    ],
    run: RunArgument = None,
    *,
    out: Annotated[
        Path | None,
        option("Write to this file or new folder; the suffix sets the file format.", default=False),
    ] = None,
    push: Annotated[
        str | None,
        option(
            "Instead of `--out`: push to this dataset or model of the Hugging Face hub.",
            metavar="OWNER/NAME",
        ),
    ] = None,
    public: Annotated[
        bool, option("Make a repository that `--push` creates public.", "--public")
    ] = False,
    store: StoreOption = None,
    where: Annotated[
        str | None,
        option(
            'Export only the rows that match this SQL condition: "reward >= 1". For dpo and reward '
            "the rows are preferences, else experiences."
        ),
    ] = None,
    sql: SelectOption = None,
    pipeline: Annotated[
        Path | None,
        option("Export the rows that this pipeline, which has no sink, returns.", metavar="FILE"),
    ] = None,
    side_columns: Annotated[
        list[str] | None,
        option("Add a side column, such as `reward=score:strict@2`; repeatable.", metavar="SPEC"),
    ] = None,
    label: LabelOption = None,
    text: Annotated[
        bool,
        option(
            "Write plain text instead of messages, where a conversation has one question and one "
            "answer.",
            "--text",
        ),
    ] = False,
    distinct: Annotated[
        bool, option("Write equal lines once: rollouts may give equal answers.", "--distinct")
    ] = False,
    at: AtOption = None,
    version: VersionOption = None,
    merge: MergeOption = True,
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Export rows to a file, or a run's weights to a folder or the hub; nothing is half-written."""
    from ...store import files

    if (out is None) == (push is None):
        raise ConfigError("an export goes to one place; set `--out` to a file, or `--push`")
    place = str(push or out)
    going = partial(_destination, what, out, push, private=not public)
    rows_only = {"--where": where, "--sql": sql, "--pipeline": pipeline, "--label": label}
    rows_only |= {"--side-columns": side_columns, "--text": text}
    rows_only |= {"--distinct": distinct, "--at": at}
    weights_only = {"RUN": run, "--version": version, "--no-merge": not merge, "--folder": folder}
    _check_given(what, rows=rows_only, weights=weights_only)
    if what == "model":
        how = {"version": version, "merge": merge, "folder": folder}
        _export_weights(open_store(store), run, going, place, as_json=as_json, **how)
        return
    rows = None if pipeline is None else _returned(pipeline, open_store(store), at)
    lake = open_store(store, at=at)
    with progress_of(f"exporting to {place}") as progress, going() as file:
        done = files.export(
            lake,
            what,
            file,
            where=where,
            sql=sql,
            rows=rows,
            with_columns=side_columns or (),
            label=label,
            as_text=text,
            distinct=distinct,
            progress=progress,
        )
    weights = dict(zip(_WEIGHTS, done.kto_weights, strict=True)) if done.kto_weights else {}
    if as_json:
        record = {"what": what, "rows": done.rows, "left_out": done.left_out, "out": place}
        record |= {"repeated": done.repeated}
        margins = {"without_margin": done.without_margin} if what == "reward" else {}
        print_json(record | {"why": done.why} | margins | weights)
        return
    print(f"wrote {counted(done.rows, 'row')} to {place}")
    say_counts("left out", done.why)
    if done.repeated:
        were = "left out" if distinct else "`--distinct` writes each once"
        print(f"{counted(done.repeated, 'line')} equal to an earlier one: {were}")
    if done.without_margin:
        print(f"no line has a margin: missing in {counted(done.without_margin, 'pair')}")
    if weights:
        good, bad = (done.labels[is_good] for is_good in (True, False))
        settings = ", ".join(f"{name}={value:.4g}" for name, value in weights.items())
        print(f"{good} desirable and {bad} undesirable rows weigh the same in TRL with {settings}")


def _returned(file: Path, lake: "Store", at: str | None) -> "pa.Table":
    from ...pipelines import Pipeline

    chain = Pipeline.from_yaml(file)
    if chain.sink is not None:
        raise ConfigError(
            f"`{file}` has a sink, but an export needs the rows that the pipeline returns; remove "
            "`sink`"
        )
    rows = chain.run(lake, at=at, full=True).rows
    assert rows is not None, "without a sink the rows are returned"
    return rows.to_arrow()


def _check_given(what: str, *, rows: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Refuse options of rows for a model, options of a model for rows, and a missing run."""
    of, others = ("rows", rows) if what == "model" else ("`model`", weights)
    for name, value in others.items():
        if value not in (None, False, [], ()):
            raise ConfigError(f"{name} is for {of}, not for `{what}`; leave it out")
    if what == "model" and weights["RUN"] is None:
        raise ConfigError("the run is missing; name it: `rlake export model RUN --out FOLDER`")


@contextmanager
def _destination(what: str, out: Path | None, push: str | None, *, private: bool) -> Iterator[Path]:
    """Yield where to write; what was written to the place of a push is then uploaded."""
    from ...store.files import ROWS_FILE, push_folder

    if out is not None or push is None:
        yield out or Path()
        return
    with TemporaryDirectory(prefix="rlake-") as folder:
        whole = Path(folder) / "pushed"
        file = whole if what == "model" else whole / ROWS_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        yield file
        push_folder(whole, push, "model" if what == "model" else "dataset", private=private)


def _export_weights(
    lake: "Store",
    run: str | None,
    going: Callable[[], AbstractContextManager[Path]],
    place: str,
    *,
    as_json: bool,
    **how: Any,
) -> None:
    assert run is not None, "`_check_given` refuses a missing run"
    with going() as folder:
        done = heavy("weight_sync.export").export_model(lake, run, folder, **how)
    kinds = {"merged": "its adapter merged into the model", "adapter": "an adapter"}
    what = kinds.get(done.kind, "a whole model")
    record = {"what": "model", "run": run, **vars(done), "out": place}
    render(record, f"wrote version {done.version} of {run} to {place}: {what}", as_json=as_json)
