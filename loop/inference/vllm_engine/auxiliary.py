"""vLLM's server for auxiliary models, ending with us: `python -m THIS_MODULE --model FOLDER ...`.

Whoever started it holds the other end of its standard input; when that closes, for whatever
reason, the server and all processes of its group are killed.
"""

import os
import signal
import sys
import threading


def main() -> None:
    """Be vLLM's server, until standard input ends."""
    threading.Thread(target=_until_alone, daemon=True).start()
    # not its command line, which does not know vLLM under the name of its builds for CPUs
    from vllm.entrypoints.launchers.api_server import (  # pyright: ignore[reportMissingImports]
        entry,
    )

    entry.main()


def _until_alone() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
