"""The command that serves a policy, and records what it answers: serve."""

import ipaddress
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

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
    token, rates = _token(serving), _feedback_token(serving)
    try:
        from ..serving.server import Server, listen
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or "fastapi", "serve") from error

    lake = opened(settings, store, "serve")
    with listen(serving.host, serving.port) as listening:
        address = _address(listening.getsockname())

        def ready(recovered: int) -> None:
            message = {"url": f"http://{address}/v1", "recovered": recovered, "store": lake.uri}
            if as_json:
                print_json(message)
            else:
                more = f"; stored {counted(recovered, 'session')} left behind" if recovered else ""
                print(f"serving {settings.name} at {message['url']}{more}; Ctrl+C ends it")
            sys.stdout.flush()

        Server(lake, settings, serving, token, rates).run(listening, ready=ready)


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


def _token(serving: "ServeConfig") -> str | None:
    """Return the token that clients need; without one, only this machine is served."""
    token = os.environ.get(serving.token_env, "").strip() or None
    if token is None and not _is_loopback(serving.host):
        from ...store.errors import ConfigError

        raise ConfigError(
            f"serving at `{serving.host}` needs a token: anybody could ask, and write to the "
            f"store; set {serving.token_env}, or serve at 127.0.0.1"
        )
    return token


def _feedback_token(serving: "ServeConfig") -> str | None:
    """Return the token that raters need; a variable that is named and not set opens no door."""
    name = serving.feedback_token_env
    token = None if name is None else os.environ.get(name, "").strip()
    if token == "":
        from ...store.errors import ConfigError

        raise ConfigError(
            f"`serve.feedback_token_env` names {name}, which is not set; set it, or leave the key "
            "out to let everybody rate who may ask"
        )
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(name: Any) -> str:
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
