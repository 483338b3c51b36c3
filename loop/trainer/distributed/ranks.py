"""Non-zero ranks: repeat every call that rank 0 broadcasts."""

import json
import os
import sys
import threading
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ...config import RunConfig
from ..learner import Learner, begin
from .join import Terms, joined, joined_torchrun
from .world import MultiProcess, is_lost


def run_rank(terms: Terms, *, host: str, port: int, rank: int, local_rank: int) -> None:
    """Join rank 0 at an address, and repeat its calls until it says `leave`."""
    seconds = timedelta(seconds=terms.seconds)
    store = TCPStore(host, port, terms.size, is_master=False, timeout=seconds)
    attend(joined(terms, store, rank=rank, local_rank=local_rank))


def run_torchrun_rank(config: RunConfig) -> None:
    """Run a rank other than 0 that torchrun started."""
    attend(joined_torchrun(Terms.of(config, size=int(os.environ["WORLD_SIZE"]))))


def attend(world: MultiProcess) -> None:
    """Repeat the calls of rank 0; errors are reported to it, and raised."""
    try:
        _attend(world)
    except Exception as error:
        # An error of a lost connection is only the effect of what another process reports.
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


def _main(call: dict[str, Any]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank = call["rank"]
    try:
        run_rank(
            Terms(**call["terms"]), host="127.0.0.1", port=call["port"], rank=rank, local_rank=rank
        )
    except Exception as error:  # noqa: BLE001 - the boundary of the program
        if not is_lost(error):
            print(f"process {rank}: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        os._exit(1)  # not `sys.exit`: a thread may still wait for a lost process
    os._exit(0)


def _end_with_parent() -> None:
    """Exit when the parent ends or closes stdin, even in the middle of a collective call."""
    os.read(0, 1)  # nothing is ever sent: this returns at the end of the stream
    os._exit(1)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
