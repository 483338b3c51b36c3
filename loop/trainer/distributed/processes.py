"""The other processes of a training: programs on this machine, or actors on Ray."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from ...runs.placement_group import in_bundle, is_restarted
from ...runs.ray import connect, last_line, ray_module

if TYPE_CHECKING:
    from .join import Terms

END_SECONDS = 30.0
"""Seconds that the other processes may take to end."""

_log = logging.getLogger(__name__)


class WorkerProcesses(Protocol):
    """The other processes of a training."""

    host: str
    notice_seconds: float
    """Seconds after which it is known that one of them died."""

    def start(self, port: int) -> None:
        """Start them; they join rank 0 at a port of its host."""
        ...

    def end(self, *, seconds: float) -> None:
        """Wait until all have ended; after `seconds`, kill the rest."""
        ...

    def wait(self, rank: int) -> str | None:
        """Wait for one to end and return why; None if it ended normally."""
        ...


class Local:
    """Processes on this machine, which end when this one does."""

    host, notice_seconds = "127.0.0.1", 2.0

    def __init__(self, terms: "Terms") -> None:
        self._terms = terms
        self._children: list[subprocess.Popen[bytes]] = []
        processors = os.cpu_count() or 1
        if terms.device == "cpu" and terms.size > processors:
            _log.warning("%d processes share %d processors", terms.size, processors)

    def start(self, port: int) -> None:
        """Start them; they join rank 0 at a port of its host."""
        # Users' `module:function` names must be found there as here, where a script's folder or a
        # notebook's changes to `sys.path` count.
        paths = os.pathsep.join(path for path in sys.path if path)
        for rank in range(1, self._terms.size):
            message = json.dumps({"terms": asdict(self._terms), "rank": rank, "port": port})
            self._children.append(
                subprocess.Popen(
                    [sys.executable, "-m", f"{__package__}.ranks", message],
                    stdin=subprocess.PIPE,  # closes however this process dies, which ends the child
                    env={**os.environ, "PYTHONPATH": paths},
                )
            )

    def end(self, *, seconds: float) -> None:
        """Wait until all have ended; after `seconds`, kill the rest."""
        for child in self._children:
            assert child.stdin is not None
            if seconds < END_SECONDS:
                child.stdin.close()  # a thread of the child exits at the end of the stream
            try:
                child.wait(seconds)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdin.close()

    def wait(self, rank: int) -> str | None:
        """Wait for one to end and return why; None if it ended normally."""
        code = self._children[rank - 1].wait()
        if code < 0:
            return f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"ended with exit code {code}" if code else None


class OnRay:
    """Actors on the Ray cluster of this process, or else on one that Ray finds or starts."""

    def __init__(self, terms: "Terms") -> None:
        self._terms, self._ray = terms, ray_module()
        self._starts = not self._ray.is_initialized()
        if self._starts:
            connect(self._ray, "auto", starts=True)
        self.host = self._ray.util.get_node_ip_address()
        # Ray says so of a node's processes when it gives up the node.
        self.notice_seconds = 60.0 if is_restarted.is_set() else 2.0
        self._ends = False
        self._actors: list[Any] = []
        self._results: list[Any] = []

    def start(self, port: int) -> None:
        """Start them; they join rank 0 at a port of its host."""
        gpus = 1 if self._terms.device == "cuda" else 0
        # Not restarted: a new actor could not take the place of a rank in the middle of a training.
        actor = self._ray.remote(num_cpus=0, num_gpus=gpus, max_restarts=0)(_RankActor)
        # That of a trainer that Ray placed, with a bundle for each process.
        group = self._ray.util.get_current_placement_group()
        for rank in range(1, self._terms.size):
            made = actor.options(**_place(group, rank)).remote()
            self._actors.append(made)
            self._results.append(made.run.remote(asdict(self._terms), self.host, port, rank))

    def end(self, *, seconds: float) -> None:
        """Wait until all have ended; after `seconds`, kill the rest."""
        self._ends = True
        if seconds >= END_SECONDS:
            self._ray.wait(self._results, num_returns=len(self._results), timeout=seconds)
        for actor in self._actors:
            self._ray.kill(actor)
        if self._starts:
            self._ray.shutdown()

    def wait(self, rank: int) -> str | None:
        """Wait for one to end and return why; None if it ended normally."""
        try:
            self._ray.get(self._results[rank - 1])
        except self._ray.exceptions.RayError as error:
            died = isinstance(error, self._ray.exceptions.RayActorError)
            if died and is_restarted.is_set() and not self._ends:
                # At once, since a collective may wait for the lost process until its timeout. Ray
                # ends the other processes, which this one owns.
                _log.warning("the trainer is started again: process %d: %s", rank, last_line(error))
                os._exit(1)
            return f"on Ray ended: {last_line(error)}"


def _place(group: Any, rank: int) -> dict[str, Any]:
    if group is None:
        return {"scheduling_strategy": "SPREAD"}
    asked = dict(group.bundle_specs[rank])
    cpus, gpus = asked.pop("CPU", 0), asked.pop("GPU", 0)
    asked.pop("memory", None)  # of a bundle of nothing else; Ray takes it apart from the others
    where = in_bundle(group, rank)
    return {"num_cpus": cpus, "num_gpus": gpus, "resources": asked, "scheduling_strategy": where}


class _RankActor:
    """An actor that runs another rank."""

    def run(self, terms: Mapping[str, Any], host: str, port: int, rank: int) -> None:
        from .join import Terms
        from .ranks import run_rank

        run_rank(Terms(**terms), host=host, port=port, rank=rank, local_rank=0)
