"""Who may ask a server: tokens from the environment, and the address where it listens."""

import ipaddress
import os
from collections.abc import Callable
from typing import Any

from ...store import Store
from ...store.errors import ConfigError
from ..config import RunConfig
from ..config.serve import ServeConfig
from .server import Server, listen


def serve(
    store: Store, config: RunConfig, settings: ServeConfig, *, ready: Callable[[str, int], None]
) -> None:
    """Serve a run's policy until a signal ends it.

    `ready` is given the address and how many sessions of an earlier server were stored. Raises
    ConfigError for a token that is missing, or an address that cannot be listened at.
    """
    token, rates = _token(settings), _feedback_token(settings)
    with listen(settings.host, settings.port) as listening:
        url = f"http://{_address(listening.getsockname())}/v1"
        Server(store, config, settings, token, rates).run(
            listening, ready=lambda recovered: ready(url, recovered)
        )


def check_tokens(settings: ServeConfig) -> None:
    """Raise ConfigError when a token that the server needs is not in the environment."""
    _token(settings)
    _feedback_token(settings)


def _token(serving: ServeConfig) -> str | None:
    """Return the token that clients need; without one, only this machine is served."""
    token = os.environ.get(serving.token_env, "").strip() or None
    if token is None and not _is_loopback(serving.host):
        raise ConfigError(
            f"serving at `{serving.host}` needs a token: anybody could ask, and write to the "
            f"store; set {serving.token_env}, or serve at 127.0.0.1"
        )
    return token


def _feedback_token(serving: ServeConfig) -> str | None:
    """Return the token that raters need; a variable that is named and not set opens no door."""
    name = serving.feedback_token_env
    token = None if name is None else os.environ.get(name, "").strip()
    if token == "":
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
