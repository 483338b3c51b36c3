"""Commands by which people say what they think of rows: label, feedback."""

import ipaddress
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from getpass import getuser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .app import ROWS, JsonOption, StoreOption, app, open_store
from .tables import counted, print_json, print_rows, screen

if TYPE_CHECKING:
    import socket

    import uvicorn

    from ...store import Store
    from ..labeling import Queue

commands = typer.Typer(help="Labels by people: add, exchange with other tools, see who agrees.")
app.add_typer(commands, name="feedback", rich_help_panel=ROWS, no_args_is_help=True)

Kind = Literal["disagreements", "borderline", "random"]
Tool = Literal["label_studio", "argilla", "jsonl"]
AnnotatorOption = Annotated[
    str | None,
    typer.Option(
        help="Who labels, else the user's name; on a page, who is named there first.",
        show_default=False,
    ),
]
QueueOption = Annotated[str, typer.Option(metavar="NAME", help="The queue's name.")]
WhereOption = Annotated[
    str | None, typer.Option(help='Among which experiences, in SQL: "step > 50"; else all.')
]
KindOption = Annotated[
    Kind,
    typer.Option(
        "--choose",
        help="disagreements: rewards, scorers and labels differ; borderline: groups near half; "
        "random.",
    ),
]
SqlOption = Annotated[
    str | None,
    typer.Option(
        metavar="SELECT", help="What to label: gives `experience_id`, and `compared_id` for pairs."
    ),
]
PairsOption = Annotated[
    bool, typer.Option("--pairs", help="Compare two tries of a group that answer differently.")
]
LimitOption = Annotated[int, typer.Option(min=1, help="Items in the queue at most.")]
SeedOption = Annotated[int, typer.Option(help="Of what is random.")]
LabelsOption = Annotated[
    str, typer.Option(metavar="CHOICES", help="Labels with their scores, or a range such as 1..5.")
]
ReviewsOption = Annotated[int, typer.Option(min=1, help="How many people label each item.")]

_ANYWHERE = ("0.0.0.0", "::")
"""Addresses that stand for all of this machine's, whatever name others call it by."""
_WAITING = 64
"""Connections that wait, or are answered, at once."""


@app.command(rich_help_panel=ROWS)
def label(
    store: StoreOption = None,
    queue: QueueOption = "review",
    choose: KindOption = "random",
    sql: SqlOption = None,
    where: WhereOption = None,
    pairs: PairsOption = False,
    question: Annotated[str, typer.Option(help="What is asked.")] = "Is this answer good?",
    labels: LabelsOption = "good=1,bad=0",
    annotator: AnnotatorOption = None,
    reviews: ReviewsOption = 1,
    limit: LimitOption = 200,
    seed: SeedOption = 0,
    web: Annotated[
        bool, typer.Option("--web", help="A page for browsers, in place of the terminal.")
    ] = False,
    host: Annotated[str, typer.Option(help="Where the page is served.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Its port; 0: a free one.")] = 8011,
    as_json: JsonOption = False,
) -> None:
    """Label rows that a query chooses; each label is a row of `feedback`, and nothing waits for it.

    Several people may label one queue at once, each in a terminal or browser of their own. An item
    that has its `--reviews`, or that you labelled or skipped, does not come again.
    """
    from ..labeling import Question, Queue, parse_choices, progress

    choices = parse_choices(labels)
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
    if web:
        _serve(lake, made, host, port, annotator)
        return
    who = annotator or getuser()
    done = _in_terminal(lake, made, who)
    at = progress(made, lake, who)
    if as_json:
        print_json({"queue": queue, "annotator": who, "labelled": done} | vars(at))
    else:
        print(f"{counted(done, 'label')} by {who}; {at.done} of {at.items} items are done")


def _in_terminal(lake: "Store", queue: "Queue", annotator: str) -> int:
    from ..labeling.terminal import TerminalForm

    console = screen(stderr=True)
    form = TerminalForm(lake, queue, annotator, console=console, ask=_line)
    return form.run()


def _line(prompt: str) -> str:
    """Read a line; the prompt goes to stderr, so that stdout is what was asked for."""
    typer.echo(prompt, nl=False, err=True)
    return input()


def _serve(lake: "Store", queue: "Queue", host: str, port: int, annotator: str | None) -> None:
    from ...store.errors import ConfigError

    try:
        import uvicorn

        from ..labeling.web import app as form
    except ImportError as error:
        raise ConfigError(
            f"a page needs {error.name}; install it with `pip install 'rlake[label]'`"
        ) from error
    is_ours = host == "localhost" or _is_loopback(host)
    token = None if is_ours else secrets.token_urlsafe(16)
    names = ("127.0.0.1", "localhost", "[::1]") if is_ours else (host, "localhost", "127.0.0.1")
    names = None if host in _ANYWHERE else names
    config = uvicorn.Config(
        form(lake, queue, hosts=names, token=token, annotator=annotator),
        host=host,
        port=port,
        log_level="warning",
        limit_concurrency=_WAITING,
        timeout_keep_alive=5,
    )
    server = uvicorn.Server(config)
    with _bound(config) as (listening, place):
        print(f"labelling at http://{place}/{f'?token={token}' if token else ''}", flush=True)
        server.run(sockets=[listening])


@contextmanager
def _bound(config: "uvicorn.Config") -> Iterator[tuple["socket.socket", str]]:
    """Listen, and say at which address: the port may have been chosen by the system."""
    import socket

    from ...store.errors import ConfigError

    try:
        [family, *_, address] = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
        listening = socket.create_server(address[:2], family=family, backlog=_WAITING)
    except OSError as error:
        raise ConfigError(
            f"cannot serve at {config.host}, port {config.port}: {error.strerror or error}; "
            "choose another `--host` or `--port`"
        ) from error
    with listening:
        host, port = listening.getsockname()[:2]
        host = socket.gethostname() if host in _ANYWHERE else host
        yield listening, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@commands.command()
def add(
    experience_id: Annotated[str, typer.Argument(metavar="ID", help="The experience.")],
    store: StoreOption = None,
    label: Annotated[str | None, typer.Option(help="The label.")] = None,
    score: Annotated[float | None, typer.Option(help="The label as a number.")] = None,
    comment: Annotated[str | None, typer.Option(help="In words.")] = None,
    annotator: AnnotatorOption = None,
) -> None:
    """Say what you think of one experience."""
    from ...store.errors import ConfigError
    from ..labeling.interchange import Given, store_labels

    if not experience_id.strip():
        raise ConfigError("the experience's ID is empty; `rlake sql` lists those that are stored")
    if label is None and score is None and comment is None:
        raise ConfigError("give a `--label`, a `--score` or a `--comment`")
    given = Given(
        experience_id=experience_id,
        annotator=annotator or getuser(),
        label=label,
        score=score,
        comment=comment,
    )
    done = store_labels(open_store(store), [given], queue=None, source="the command line")
    print("stored" if done.rows else "there already")


@commands.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="What a tool exported, JSON or JSONL.")],
    store: StoreOption = None,
    format: Annotated[Tool, typer.Option(help="Which tool's.")] = "jsonl",
    queue: Annotated[
        str | None, typer.Option(metavar="NAME", help="The queue that it answers, if any.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Store the labels of a file, all or none; a second import of it adds nothing."""
    from ...store.files.annotations import FORMATS, answers
    from ..labeling.interchange import store_labels

    given = answers(file, FORMATS[format])
    done = store_labels(open_store(store), given, queue=queue, source=str(file))
    if as_json:
        print_json({"rows": done.rows, "already": done.duplicates, "file": str(file)})
    else:
        print(
            f"imported {counted(done.rows, 'label')} from {file}, {done.duplicates} there already"
        )


@commands.command()
def export(
    out: Annotated[Path, typer.Option(help="The file, .json or .jsonl.")],
    store: StoreOption = None,
    format: Annotated[Tool, typer.Option(help="Which tool asks.")] = "jsonl",
    queue: QueueOption = "review",
    choose: KindOption = "random",
    sql: SqlOption = None,
    where: WhereOption = None,
    pairs: PairsOption = False,
    limit: LimitOption = 200,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Write what a queue asks, for another tool; `feedback import` takes the answers."""
    from ...store.files.annotations import FORMATS, write
    from ..labeling import Queue
    from ..labeling.interchange import asked

    lake = open_store(store)
    made = Queue.chosen(
        lake,
        name=queue,
        kind=choose,
        sql=sql,
        where=where,
        in_pairs=pairs,
        limit=limit,
        seed=seed,
    )
    rows = write(out, asked(lake, made.items), FORMATS[format])
    if as_json:
        print_json({"rows": rows, "out": str(out)})
    else:
        print(f"wrote {counted(rows, 'item')} of queue {queue} to {out}")


@commands.command()
def agreement(
    store: StoreOption = None,
    queue: Annotated[str | None, typer.Option(metavar="NAME", help="One queue, else all.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how far people agree: shares, Krippendorff's alpha, and Cohen's kappa of each two."""
    from ...store.query import literal

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
        print("no item was labelled by two people yet")
        return
    print_rows(all_.columns, all_.rows())
    print_rows(two.columns, two.rows())


@commands.command("settle")
def settle_(
    store: StoreOption = None,
    queue: QueueOption = "review",
    reviews: ReviewsOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Store what most people of a queue said: labels by `majority`, pairs as `preferences`.

    A run trains on it with `trainer.side_columns: [reward=feedback:score@majority]`.
    """
    from ..labeling import settle

    done = settle(open_store(store), queue, reviews=reviews)
    if as_json:
        print_json(vars(done))
        return
    print(
        f"settled {counted(done.labels, 'label')} and {counted(done.preferences, 'preference')}; "
        f"{done.ties} without a majority, {done.waiting} wait for more reviews"
    )
