"""Run as a process: it broadcasts weights to one SGLang server, as `group.py` says.

It forms the group with the server, then broadcasts the tensors that each line of its input names,
and writes a line when they are sent. It ends with its input, and so with the process before it.
"""

import json
import os
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TextIO

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore

from ....store.errors import message_of
from ..shared_tensors import opened


def main(terms: Mapping[str, Any], answers: TextIO) -> None:
    """Form the group of `terms`, and broadcast until the input ends."""
    lines = SimpleQueue[str]()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    wait = timedelta(seconds=terms["seconds"])
    store = TCPStore(terms["host"], 0, None, is_master=True, timeout=wait, wait_for_workers=False)
    _say(answers, port=store.port)
    device = "cuda" if terms["backend"] == "nccl" else "cpu"
    group = _group(store, terms, device, wait)
    _say(answers)
    while True:
        asked = json.loads(lines.get())
        tensors = opened(asked["source"])
        sent = [tensors[name].to(device) for name in asked["names"]]
        for work in [group.broadcast(tensor, 0) for tensor in sent]:
            work.wait(wait)
        _say(answers)


def _group(store: TCPStore, terms: Mapping[str, Any], device: str, wait: timedelta) -> Any:
    """Return the group; blocks until all processes of the server have joined it."""
    apart: Any = store
    # As torch nests the names that SGLang gives it.
    for prefix in (terms["group"], f"{terms['group']}/", f"{device}/"):
        apart = PrefixStore(prefix, apart)
    if terms["backend"] == "nccl":
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        return dist.ProcessGroupNCCL(apart, 0, terms["size"], options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = wait
    options._devices = [gloo.create_device(hostname=terms["host"])]
    return gloo(apart, 0, terms["size"], options)


def _read(lines: "SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line)
    # At once: the main thread may wait for a server that is gone.
    os._exit(0)


def _say(answers: TextIO, **found: Any) -> None:
    answers.write(json.dumps(found) + "\n")
    answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as own:
        os.dup2(2, 1)  # NCCL prints to the standard output
        try:
            main(json.loads(sys.argv[1]), own)
        except (RuntimeError, OSError, KeyError) as error:
            _say(own, error=message_of(error))
