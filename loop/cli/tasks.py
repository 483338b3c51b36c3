"""Commands about tasks: new ones, proposed by a model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .app import ROWS, JsonOption, StoreOption, app, open_store
from .tables import counted, print_json, screen

commands = typer.Typer(help="New tasks, proposed by a model.")
app.add_typer(commands, name="tasks", rich_help_panel=ROWS, no_args_is_help=True)


@commands.command()
def generate(
    by: Annotated[
        str,
        typer.Option(
            help="An async function of messages that returns text, as package.module:function; or "
            "an endpoint as YAML: '{url: http://127.0.0.1:8000/v1, model: NAME, temperature: 1.0}'."
        ),
    ],
    taskset: Annotated[str, typer.Option(help="The set that the new tasks belong to.")],
    number: Annotated[int, typer.Option("-n", min=1, help="How many the set is to have.")],
    store: StoreOption = None,
    examples: Annotated[
        str, typer.Option(metavar="WHERE", help="Stored tasks that are shown as examples, in SQL.")
    ] = "split = 'train'",
    instruction: Annotated[
        Path | None, typer.Option(help="A file with other words for what is wanted.")
    ] = None,
    attempts: Annotated[
        int | None, typer.Option(min=1, help="Requests at most; else three times what is needed.")
    ] = None,
    alike: Annotated[
        float, typer.Option(min=0, max=1, help="A task this much like another is not new.")
    ] = 0.9,
    seed: Annotated[int, typer.Option(help="Chooses the examples of each request.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Let a model propose tasks until a set has so many; what is not new or complete is dropped.

    The same call goes on with what one that was killed has stored.
    """
    from ...operators.chat_client import chat_client
    from ...store.errors import JobError
    from ...store.files.text import read_text
    from ...store.files.yaml_text import parse_yaml
    from ..tasks.synthesis import INSTRUCTION, propose

    spec: Any = parse_yaml(by, f"`--by {by}`") if by.lstrip().startswith("{") else by
    who = spec if isinstance(spec, str) else str(spec.get("model"))
    words = read_text(instruction) if instruction else INSTRUCTION
    lake = open_store(store)
    with screen(stderr=True).status("asking") as shown:
        done = propose(
            lake,
            chat_client(spec),
            taskset=taskset,
            number=number,
            by=who,
            examples=examples,
            instruction=words,
            attempts=attempts,
            alike=alike,
            seed=seed,
            listener=lambda d: shown.update(f"{d.stored} new tasks in {d.requests} requests"),
        )
    if done.requests and not done.stored:
        message = ", ".join(f"{n} of them: {why}" for why, n in done.refused.most_common(3))
        failed = f"; {done.failure}" if done.failure else ""
        raise JobError(f"no new task in {counted(done.requests, 'request')}; {message}{failed}")
    if as_json:
        print_json(vars(done) | {"refused": dict(done.refused)})
        return
    have = done.stored + done.already
    print(f"{counted(done.stored, 'new task')} in {counted(done.requests, 'request')}", end="")
    print(f"; `{taskset}` has {have} of {number}")
    for why, times in done.refused.most_common():
        print(f"not kept, {counted(times, 'proposal')}: {why}")
