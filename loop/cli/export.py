"""The command that moves rows out of the store into files, and weights into folders: export."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .app import ROWS, AtOption, JsonOption, StoreOption, app, open_store
from .export_model import (
    FolderOption,
    MergeOption,
    RunArgument,
    VersionOption,
    check_given,
    export_weights,
)
from .import_ import progress_of, say_counts
from .tables import counted, print_json

if TYPE_CHECKING:
    import pyarrow as pa

    from ...store import Store

_WEIGHTS = ("desirable_weight", "undesirable_weight")

EXPORT_FORMATS = """\b
What is written:
  sft          {"prompt", "completion"}: a line for each assistant turn, for TRL
  dpo          {"prompt", "chosen", "rejected"}: the pairs of `preferences`, for TRL
  reward       {"prompt", "chosen", "rejected", "margin"}: pairs for a reward model of TRL
  kto          {"prompt", "completion", "label"}: true where the reward is above 0, for TRL
  chat         {"messages", "tools"}: whole conversations, as OpenAI fine-tuning
  sharegpt     {"conversations": [{"from", "value"}], "system", "tools"}
  experiences  all columns, or those of any SELECT
  model        a run's weights, as a new folder that transformers or peft loads

\b
How, by the suffix of `--out`:
  .jsonl       lines of JSON; messages and tools as they are spelled in the store
  .parquet     Parquet
  .arrow       an Arrow IPC file
  none         a folder that Hugging Face datasets opens with load_from_disk
"""


@app.command(rich_help_panel=ROWS, epilog=EXPORT_FORMATS)
def export(
    what: Annotated[
        Literal["sft", "dpo", "reward", "kto", "chat", "sharegpt", "experiences", "model"],
        typer.Argument(help="Conversations, pairs, whole rows, or weights; see below."),
    ],
    run: RunArgument = None,
    *,
    out: Annotated[Path, typer.Option(help="The file, or a new folder; its suffix says how.")],
    store: StoreOption = None,
    where: Annotated[
        str | None,
        typer.Option(
            help='Which rows, in SQL: "reward >= 1"; of preferences for dpo and reward, else of '
            "experiences."
        ),
    ] = None,
    sql: Annotated[
        str | None,
        typer.Option(
            metavar="SELECT",
            help="Rows of your own: with `messages`, or `prompt_text` and `response_text`; for kto "
            "also `label`; for dpo and reward `chosen_id` and `rejected_id`.",
        ),
    ] = None,
    pipeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The rows that a pipeline without a sink returns, in place of all."
        ),
    ] = None,
    with_columns: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="SIDE", help="Side columns, such as `reward=score:strict@2`."
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            metavar="SQL",
            help="For kto: which rows are desirable, told of all of them before `--where`. "
            '"reward > avg(reward) OVER (PARTITION BY group_id)"; else "reward > 0".',
        ),
    ] = None,
    text: Annotated[
        bool,
        typer.Option(
            "--text", help="Plain text in place of messages, of one question and one answer."
        ),
    ] = False,
    at: AtOption = None,
    version: VersionOption = None,
    merge: MergeOption = True,
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Export rows to a file, or a run's weights to a folder, whole or not at all."""
    from ...store import files

    rows_only = {"--where": where, "--sql": sql, "--pipeline": pipeline, "--with": with_columns}
    rows_only |= {"--label": label, "--text": text, "--at": at}
    weights_only = {"RUN": run, "--version": version, "--no-merge": not merge, "--folder": folder}
    check_given(what, rows=rows_only, weights=weights_only)
    if what == "model":
        export_weights(
            open_store(store),
            run,
            out,
            version=version,
            merge=merge,
            folder=folder,
            as_json=as_json,
        )
        return
    rows = None if pipeline is None else _returned(pipeline, open_store(store), at)
    lake = open_store(store, at=at)
    with progress_of(f"exporting to {out}") as progress:
        done = files.export(
            lake,
            what,
            out,
            where=where,
            sql=sql,
            rows=rows,
            with_columns=with_columns or (),
            label=label,
            as_text=text,
            progress=progress,
        )
    weights = dict(zip(_WEIGHTS, done.kto_weights, strict=True)) if done.kto_weights else {}
    if as_json:
        told = {"what": what, "rows": done.rows, "left_out": done.left_out, "out": str(out)}
        margins = {"without_margin": done.without_margin} if what == "reward" else {}
        print_json(told | {"why": done.why} | margins | weights)
        return
    print(f"wrote {counted(done.rows, 'row')} to {out}")
    say_counts("left out", done.why)
    if done.without_margin:
        print(f"no line has a margin: {counted(done.without_margin, 'pair')} came without one")
    if weights:
        good, bad = (done.labels[is_good] for is_good in (True, False))
        told = ", ".join(f"{name}={value:.4g}" for name, value in weights.items())
        print(f"{good} desirable and {bad} undesirable rows weigh the same in TRL with {told}")


def _returned(file: Path, lake: "Store", at: str | None) -> "pa.Table":
    """Run a pipeline without a sink and return its rows."""
    from ...pipelines import Pipeline
    from ...store.errors import ConfigError

    chain = Pipeline.from_yaml(file)
    if chain.sink is not None:
        raise ConfigError(
            f"`{file}` has a sink, and an export takes the rows that a pipeline returns; leave "
            "`sink` out"
        )
    rows = chain.run(lake, at=at, full=True).rows
    assert rows is not None, "without a sink the rows are returned"
    return rows.to_arrow()
