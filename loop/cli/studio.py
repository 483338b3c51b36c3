"""The command `studio`: a web application over a store."""

import os
import sys
import webbrowser
from typing import Annotated

from ...store.errors import ConfigError
from .app import ROWS, AtOption, StoreOption, app, heavy, open_store, option


@app.command(rich_help_panel=ROWS)
def studio(
    store: StoreOption = None,
    at: AtOption = None,
    host: Annotated[
        str, option("Listen on this address; elsewhere than here, its link has a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, option("Listen on this port; 0 takes a free one.", min=0, max=65535)
    ] = 8012,
    write: Annotated[
        bool,
        option(
            "Let the pages start and stop runs, store labels, take and restore snapshots, maintain "
            "the store and try operators.",
            "--write",
        ),
    ] = False,
    no_open: Annotated[bool, option("Do not open a browser.", "--no-open")] = False,
) -> None:
    """Look at runs, rollouts and tables in a browser, live; Ctrl-C ends it.

    It reads the store and nothing else, unless it is started with `--write`.
    """
    if write and at is not None:
        raise ConfigError("`--at` shows the past, which `--write` cannot change; leave one out")
    server = heavy("studio.server", "studio")
    lake = open_store(store, at=at)

    def ready(url: str) -> None:
        print(f"studio at {url}; Ctrl-C ends it", flush=True)
        if not no_open and sys.stdout.isatty() and _has_screen():
            webbrowser.open(url)

    name = f"{lake.uri} at {at}" if at else lake.uri
    server.serve(lake, host=host, port=port, can_write=write, name=name, ready=ready)


def _has_screen() -> bool:
    """Return whether a browser has a screen: else one of the terminal would be opened."""
    return sys.platform in ("darwin", "win32") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
