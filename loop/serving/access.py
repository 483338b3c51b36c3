"""Access to a server: tokens from the environment, and the address on which it listens."""

import os
from collections.abc import Callable

from ...operators.endpoint import is_loopback
from ...store import Store
from ...store.errors import ConfigError
from ..chat_api.limits import listen
from ..config import RunConfig
from ..config.serve import ServeConfig
from .server import Server


def serve(
    store: Store, config: RunConfig, settings: ServeConfig, *, ready: Callable[[str, int], None]
) -> None:
    """Serve a run's policy until a signal ends it.

    `ready` receives the address and the number of recovered sessions. Raises ConfigError for a
    missing token or an address that is not available.
    """
    found = tokens(settings)
    with listen(settings.host, settings.port) as listening:
        host, port = listening.getsockname()[:2]
        url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
        Server(store, config, settings, *found).run(
            listening, ready=lambda recovered: ready(url, recovered)
        )


def tokens(settings: ServeConfig) -> tuple[str | None, str | None]:
    """Return the tokens of clients and of feedback; raise ConfigError if one is missing."""
    return _token(settings), _feedback_token(settings)


def _token(serving: ServeConfig) -> str | None:
    """Return the token that clients need; without one, only this machine is served."""
    token = os.environ.get(serving.token_env, "").strip() or None
    if token is None and not is_loopback(serving.host):
        raise ConfigError(
            f"serving at `{serving.host}` needs a token, or anyone could write to the store; "
            f"set {serving.token_env}, or serve at 127.0.0.1"
        )
    return token


def _feedback_token(serving: ServeConfig) -> str | None:
    """Return the token for feedback. A variable that is named but not set is an error."""
    name = serving.feedback_token_env
    token = None if name is None else os.environ.get(name, "").strip()
    if token == "":
        raise ConfigError(
            f"`serve.feedback_token_env` names {name}, which is not set; set it, or remove the key "
            "to accept feedback from every client"
        )
    return token
