"""The commands `label` and `feedback`: add, exchange and adjudicate people's labels."""

from getpass import getuser
from pathlib import Path
from typing import Annotated, Literal

import typer

from ...store.errors import ConfigError
from ...store.query import literal
from .app import (
    ROWS,
    JsonOption,
    SeedOption,
    StoreOption,
    WhereOption,
    app,
    argument,
    heavy,
    open_store,
    option,
)
from .tables import counted, print_json, print_rows, render, screen

commands = typer.Typer(
    help="Add people's labels, exchange them with other tools, and measure agreement."
)
app.add_typer(commands, name="feedback", rich_help_panel=ROWS, no_args_is_help=True)

Kind = Literal["disagreements", "borderline", "random"]
Tool = Literal["label_studio", "argilla", "jsonl"]
AnnotatorOption = Annotated[
    str | None,
    option("Store labels under this name; with --web, suggest it.", default="the user's name"),
]
QueueOption = Annotated[str, option("Use the queue of this name.", metavar="NAME")]
KindOption = Annotated[
    Kind,
    option(
        "Choose experiences whose rewards, scores and labels differ (disagreements), whose "
        "groups pass about half of the time (borderline), or any (random).",
        "--choose",
    ),
]
SqlOption = Annotated[
    str | None,
    option(
        "Label the rows of this query, which returns `experience_id`, and `compared_id` for pairs.",
        metavar="SELECT",
    ),
]
PairsOption = Annotated[
    bool, option("Compare two rollouts of a group that answer differently.", "--pairs")
]
LimitOption = Annotated[int, option("Put at most this many items into the queue.", min=1)]
LabelsOption = Annotated[
    str, option("Offer these labels with their scores, or a range such as 1..5.", metavar="CHOICES")
]
ReviewsOption = Annotated[
    int, option("Ask for this many labels of each item, by different people.", min=1)
]


@app.command(rich_help_panel=ROWS)
def label(
    store: StoreOption = None,
    queue: QueueOption = "review",
    choose: KindOption = "random",
    sql: SqlOption = None,
    where: WhereOption = None,
    pairs: PairsOption = False,
    question: Annotated[str, option("Ask annotators this question.")] = "Is this answer good?",
    labels: LabelsOption = "good=1,bad=0",
    annotator: AnnotatorOption = None,
    reviews: ReviewsOption = 1,
    limit: LimitOption = 200,
    seed: SeedOption = 0,
    web: Annotated[
        bool, option("Serve a web page instead of asking in the terminal.", "--web")
    ] = False,
    host: Annotated[str, option("Serve the page on this address.")] = "127.0.0.1",
    port: Annotated[
        int, option("Serve the page on this port; 0 takes a free one.", min=0, max=65535)
    ] = 8011,
    as_json: JsonOption = False,
) -> None:
    """Label the rows that a query chooses; each label is a row of `feedback`.

    Several people may label one queue at once, each in a terminal or browser. An item that has all
    its `--reviews`, or that you labeled or skipped, is not shown again.
    """
    from ..labeling import Question, Queue, parse_choices, progress
    from ..labeling.terminal import TerminalForm

    choices = parse_choices(labels)
    server = heavy("studio.server", "studio") if web else None
    lake = open_store(store)
    made = Queue.chosen(
        lake,
        name=queue,
        question=Question(question, choices),
        kind=choose,
        sql=sql,
        where=where,
        in_pairs=pairs,
        reviews=reviews,
        limit=limit,
        seed=seed,
    )
    made.check(lake)
    if server is not None:
        server.serve(
            lake,
            host=host,
            port=port,
            name=lake.uri,
            ready=lambda url: print(f"labeling at {url}", flush=True),
            queue=made,
            annotator=annotator or "",
        )
        return
    who = annotator or getuser()
    done = TerminalForm(lake, made, who, console=screen(stderr=True), ask=_line).run()
    at = progress(made, lake, who)
    record = {"queue": queue, "annotator": who, "labeled": done} | vars(at)
    text = f"{counted(done, 'label')} by {who}; {at.done} of {at.items} items are done"
    render(record, text, as_json=as_json)


def _line(prompt: str) -> str:
    """Read a line; the prompt goes to stderr, which keeps stdout for the result."""
    typer.echo(prompt, nl=False, err=True)
    return input()


@commands.command()
def add(
    experience_id: Annotated[str, argument("Use the experience with this ID.", metavar="ID")],
    store: StoreOption = None,
    label: Annotated[str | None, option("Store this label.")] = None,
    score: Annotated[float | None, option("Store this number as the label's score.")] = None,
    comment: Annotated[str | None, option("Store this comment.")] = None,
    annotator: AnnotatorOption = None,
) -> None:
    """Label one experience."""
    from ..labeling.interchange import Given, store_labels

    if not experience_id.strip():
        raise ConfigError("the experience's ID is empty; list IDs with `rlake sql`")
    if label is None and score is None and comment is None:
        raise ConfigError("nothing to store; give a `--label`, a `--score` or a `--comment`")
    given = Given(
        experience_id=experience_id,
        annotator=annotator or getuser(),
        label=label,
        score=score,
        comment=comment,
    )
    done = store_labels(open_store(store), [given], queue=None, source="the command line")
    print("stored" if done.rows else "already stored")


@commands.command("import")
def import_(
    file: Annotated[Path, argument("Read this JSON or JSONL file.")],
    store: StoreOption = None,
    format: Annotated[Tool, option("Read the export format of this tool.")] = "jsonl",
    queue: Annotated[
        str | None, option("Count the labels as answers to this queue.", metavar="NAME")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Import the labels of a file, all or none; importing it again adds nothing."""
    from ...store.files.annotations import FORMATS, answers
    from ..labeling.interchange import store_labels

    given = answers(file, FORMATS[format])
    done = store_labels(open_store(store), given, queue=queue, source=str(file))
    record = {"rows": done.rows, "already": done.duplicates, "file": str(file)}
    text = f"imported {counted(done.rows, 'label')} from {file}, {done.duplicates} already stored"
    render(record, text, as_json=as_json)


@commands.command()
def export(
    out: Annotated[Path, option("Write to this .json or .jsonl file.")],
    store: StoreOption = None,
    format: Annotated[Tool, option("Write the import format of this tool.")] = "jsonl",
    queue: QueueOption = "review",
    choose: KindOption = "random",
    sql: SqlOption = None,
    where: WhereOption = None,
    pairs: PairsOption = False,
    limit: LimitOption = 200,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Export the items of a queue to another tool; `feedback import` reads the answers."""
    from ...store.files.annotations import FORMATS, write
    from ..labeling import Queue
    from ..labeling.interchange import asked

    lake = open_store(store)
    made = Queue.chosen(
        lake, name=queue, kind=choose, sql=sql, where=where, in_pairs=pairs, limit=limit, seed=seed
    )
    rows = write(out, asked(lake, made.items), FORMATS[format])
    text = f"wrote {counted(rows, 'item')} of queue {queue} to {out}"
    render({"rows": rows, "out": str(out)}, text, as_json=as_json)


@commands.command()
def agreement(
    store: StoreOption = None,
    queue: Annotated[
        str | None, option("Report only this queue.", metavar="NAME", default="all")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Report how far annotators agree: percentages, Krippendorff's alpha, Cohen's kappas."""
    lake = open_store(store)
    where = "" if queue is None else f" WHERE queue = {literal(queue)}"
    all_ = lake.sql(f"SELECT * FROM agreement{where} ORDER BY queue").pl()
    two = lake.sql(
        f"SELECT * FROM pairwise_agreement{where} ORDER BY queue, annotator, other_annotator"
    ).pl()
    if as_json:
        print_json({"queues": all_.to_dicts(), "pairs": two.to_dicts()})
        return
    if all_.is_empty():
        print("no item has labels of two people yet")
        return
    print_rows(all_.columns, all_.rows())
    print_rows(two.columns, two.rows())


@commands.command("adjudicate")
def adjudicate_(
    store: StoreOption = None,
    queue: QueueOption = "review",
    reviews: ReviewsOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Store the majority's answer: labels by the annotator `majority`, pairs as `preferences`.

    A run trains on it with `trainer.side_columns: [reward=feedback:score@majority]`.
    """
    from ..labeling import adjudicate

    done = adjudicate(open_store(store), queue, reviews=reviews)
    text = (
        f"adjudicated {counted(done.labels, 'label')} and "
        f"{counted(done.preferences, 'preference')}; {done.ties} without a majority, "
        f"{done.waiting} wait for more reviews"
    )
    render(vars(done), text, as_json=as_json)
