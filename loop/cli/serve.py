"""The command that serves a policy, and records what it answers: serve."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .app import JOBS, JsonOption, StoreOption, app
from .lazy import opened
from .run import ConfigArgument, SetOption
from .tables import counted, print_json

if TYPE_CHECKING:
    from ..config import RunConfig
    from ..config.serve import ServeConfig

ModelOption = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="NAME=PATH", help="Serve another model beside the policy."),
]


@app.command(rich_help_panel=JOBS)
def serve(
    config: ConfigArgument,
    store: StoreOption = None,
    overrides: SetOption = None,
    host: Annotated[
        str | None, typer.Option(help="Where to listen; loopback when left out.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="8010 when left out; 0: a free one.")
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The environment variable that holds clients' token."),
    ] = None,
    models: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer OpenAI's chat API with a run's policy; every conversation becomes rows.

    It follows the weights that the run publishes, and takes rewards by `POST /feedback`.
    """
    from ...store.errors import missing_extra
    from ..config import load

    settings = load(config, overrides or [])
    serving = _settings(settings, host, port, token_env, models or [])
    try:
        from ..serving import access
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or "fastapi", "serve") from error
    access.check_tokens(serving)
    lake = opened(settings, store, "serve")

    def ready(url: str, recovered: int) -> None:
        message = {"url": url, "recovered": recovered, "store": lake.uri}
        if as_json:
            print_json(message)
        else:
            more = f"; stored {counted(recovered, 'session')} left behind" if recovered else ""
            print(f"serving {settings.name} at {message['url']}{more}; Ctrl+C ends it")
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
