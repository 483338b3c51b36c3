"""The command `tasks generate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ...store.errors import JobError
from .app import ROWS, JsonOption, StoreOption, app, open_store, option
from .tables import counted, print_json, screen

commands = typer.Typer(help="Generate new tasks with a model.")
app.add_typer(commands, name="tasks", rich_help_panel=ROWS, no_args_is_help=True)


@commands.command()
def generate(
    by: Annotated[
        str,
        option(
            "Propose tasks with this async function from messages to text, as "
            "package.module:function, or with an endpoint as YAML: "
            "'{url: http://127.0.0.1:8000/v1, model: NAME, temperature: 1.0}'."
        ),
    ],
    taskset: Annotated[str, option("Add the new tasks to this taskset.")],
    number: Annotated[int, option("Stop when the taskset has this many tasks.", "-n", min=1)],
    store: StoreOption = None,
    examples: Annotated[
        str,
        option("Show the stored tasks that match this SQL condition as examples.", metavar="WHERE"),
    ] = "split = 'train'",
    instruction: Annotated[
        Path | None, option("Read the prompt from this file.", default="a built-in prompt")
    ] = None,
    attempts: Annotated[
        int | None,
        option("Send at most this many requests.", min=1, default="three times what is needed"),
    ] = None,
    alike: Annotated[
        float, option("Reject a task whose similarity to another is at least this.", min=0, max=1)
    ] = 0.9,
    seed: Annotated[int, option("Seed the choice of examples with this number.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Generate tasks with a model until a taskset is full.

    Proposals that are duplicates or incomplete are dropped. The same command continues after it was
    killed.
    """
    from ...operators.chat_client import chat_client
    from ...store.files.yaml_text import parse_yaml, read_text
    from ..tasks.synthesis import INSTRUCTION, propose

    spec: Any = parse_yaml(by, f"`--by {by}`") if by.lstrip().startswith("{") else by
    who = spec if isinstance(spec, str) else str(spec.get("model"))
    words = read_text(instruction) if instruction else INSTRUCTION
    lake = open_store(store)
    with screen(stderr=True).status("generating") as shown:
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
        print(f"rejected, {counted(times, 'proposal')}: {why}")
