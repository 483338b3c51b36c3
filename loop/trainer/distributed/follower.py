"""The other processes of a training: they make each call that the first one makes."""

import json
import os
import sys
import threading
from datetime import timedelta
from typing import Any

from torch.distributed import (
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from ...config import RunConfig
from ..learner import Learner, begin
from .join import Terms, joined, joined_torchrun
from .world import MultiProcess, is_lost


def run_rank(terms: Terms, *, host: str, port: int, rank: int, local_rank: int) -> None:
    """Join the first process at an address, and make its calls until it says to leave."""
    seconds = timedelta(seconds=terms.seconds)
    store = TCPStore(host, port, terms.size, is_master=False, timeout=seconds)
    attend(joined(terms, store, rank=rank, local_rank=local_rank))


def follow_torchrun(config: RunConfig) -> None:
    """Be one of the processes that torchrun started, and not the first."""
    attend(joined_torchrun(Terms.of(config, size=int(os.environ["WORLD_SIZE"]))))


def attend(world: MultiProcess) -> None:
    """Make the calls of the first process; what fails here is reported to it, and raised."""
    try:
        _attend(world)
    except Exception as error:
        if not is_lost(error):
            world.report(error)
        raise


def _attend(world: MultiProcess) -> None:
    learner: Learner | None = None
    while True:
        name, arguments = world.receive_call()
        if name == "leave":
            return
        if name == "begin":
            learner = begin(world, *arguments)
        else:
            getattr(learner, name)(*arguments)


def _main(told: dict[str, Any]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank = told["rank"]
    try:
        run_rank(
            Terms(**told["terms"]), host="127.0.0.1", port=told["port"], rank=rank, local_rank=rank
        )
    except Exception as error:  # noqa: BLE001 - the boundary of the program
        if not is_lost(error):
            print(f"process {rank}: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        os._exit(1)  # threads that write or wait are of no use any more
    os._exit(0)


def _end_with_parent() -> None:
    """End when the process that started this one ends, whatever this one is doing."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
