"""The command `serve`: serve a policy and record its conversations."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .app import JOBS, JsonOption, StoreOption, app, heavy, opened, option
from .run import ConfigArgument, SetOption
from .tables import counted, render

if TYPE_CHECKING:
    from ..config import RunConfig
    from ..config.serve import ServeConfig

ModelOption = Annotated[
    list[str] | None, option("Also serve this model; repeatable.", "--model", metavar="NAME=PATH")
]


@app.command(rich_help_panel=JOBS)
def serve(
    config: ConfigArgument,
    store: StoreOption = None,
    overrides: SetOption = None,
    host: Annotated[str | None, option("Listen on this address.", default="127.0.0.1")] = None,
    port: Annotated[
        int | None,
        option("Listen on this port; 0 takes a free one.", min=0, max=65535, default="8010"),
    ] = None,
    token_env: Annotated[
        str | None,
        option("Require the token that this environment variable holds.", metavar="NAME"),
    ] = None,
    models: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a run's policy through OpenAI's APIs; every conversation becomes rows.

    The server follows the weights that the run publishes, and takes rewards by `POST /feedback`.
    """
    from ..config import load
    from ..runs.job import run_folder
    from ..weight_sync.subscriber import published

    settings = load(config, overrides or [])
    serving = _settings(settings, host, port, token_env, models or [])
    access = heavy("serving.access", "serve")
    # before a store is created and models are loaded
    access.tokens(serving)
    lake = opened(settings, store, "serve")

    def ready(url: str, recovered: int) -> None:
        found = published(lake, run_folder(lake, settings), settings.name)
        origin, number = settings.model.run, settings.model.version
        start = "the model as it is"
        if origin is not None:
            start = f"{'the newest version' if number is None else f'version {number}'} of {origin}"
        which = f"version {max(found)}" if found else f"no version published: {start}"
        more = f"; recovered {counted(recovered, 'session')}" if recovered else ""
        text = f"serving {settings.name} ({which}) at {url}{more}; Ctrl+C stops it"
        facts = {"url": url, "version": max(found, default=None), "recovered": recovered}
        render(facts | {"store": lake.uri}, text, as_json=as_json)
        sys.stdout.flush()

    access.serve(lake, settings, serving, ready=ready)


def _settings(
    config: "RunConfig",
    host: str | None,
    port: int | None,
    token_env: str | None,
    models: list[str],
) -> "ServeConfig":
    from ..config.serve import ServeConfig

    tree = (config.serve or ServeConfig()).model_dump()
    given = {"host": host, "port": port, "token_env": token_env}
    tree |= {name: value for name, value in given.items() if value is not None}
    for text in models:
        name, sign, path = text.partition("=")
        if not sign or not name or not path:
            raise typer.BadParameter(f"`--model {text}` must look like `judge=path/to/model`")
        tree["models"][name] = {"path": path}
    return ServeConfig.model_validate(tree)
