"""The other processes of a training, as they are started: programs here, or actors on Ray."""

import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from ....store.errors import missing_extra

if TYPE_CHECKING:
    from .join import Terms

END_SECONDS = 30.0
"""How long the other processes may take to end."""

_log = logging.getLogger(__name__)


class WorkerProcesses(Protocol):
    """The other processes, as they were started."""

    host: str

    def start(self, port: int) -> None:
        """Start them; they are to meet the first process at a port of its host."""
        ...

    def end(self, *, seconds: float) -> None:
        """Have all ended, those by force that do not end within some seconds."""
        ...

    def wait(self, rank: int) -> str | None:
        """Wait for one to end, and say why it did; None when it left as it should."""
        ...


class Local:
    """Processes on this machine; they end when this one does."""

    host = "127.0.0.1"

    def __init__(self, terms: "Terms") -> None:
        self._terms = terms
        self._children: list[subprocess.Popen[bytes]] = []
        processors = os.cpu_count() or 1
        if terms.device == "cpu" and terms.size > processors:
            _log.warning("%d processes share %d processors", terms.size, processors)

    def start(self, port: int) -> None:
        """Start them; they are to meet the first process at a port of its host."""
        paths = os.pathsep.join(path for path in sys.path if path)
        for rank in range(1, self._terms.size):
            message = json.dumps({"terms": asdict(self._terms), "rank": rank, "port": port})
            self._children.append(
                subprocess.Popen(
                    [sys.executable, "-m", f"{__package__}.follower", message],
                    stdin=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": paths},
                )
            )

    def end(self, *, seconds: float) -> None:
        """Have all ended, those by force that do not end within some seconds."""
        for child in self._children:
            assert child.stdin is not None
            if seconds < END_SECONDS:
                child.stdin.close()  # ends it, whatever it is doing
            try:
                child.wait(seconds)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdin.close()

    def wait(self, rank: int) -> str | None:
        """Wait for one to end, and say why it did; None when it left as it should."""
        code = self._children[rank - 1].wait()
        if code < 0:
            return f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"ended with exit code {code}" if code else None


class OnRay:
    """Actors on the Ray that runs in this process, or else on the one that Ray finds or starts."""

    def __init__(self, terms: "Terms") -> None:
        self._terms, self._ray = terms, _ray()
        self._starts = not self._ray.is_initialized()
        if self._starts:
            with warnings.catch_warnings():
                # Ray starts its own programs; none of them goes on in a fork of this process
                warnings.filterwarnings("ignore", "lance is not fork-safe")
                self._ray.init(
                    include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
                )
        self.host = self._ray.util.get_node_ip_address()
        self._actors: list[Any] = []
        self._results: list[Any] = []

    def start(self, port: int) -> None:
        """Start them; they are to meet the first process at a port of its host."""
        gpus = 1 if self._terms.device == "cuda" else 0
        actor = self._ray.remote(num_cpus=0, num_gpus=gpus, max_restarts=0)(_Follower)
        for rank in range(1, self._terms.size):
            made = actor.options(scheduling_strategy="SPREAD").remote()
            self._actors.append(made)
            self._results.append(made.follow.remote(asdict(self._terms), self.host, port, rank))

    def end(self, *, seconds: float) -> None:
        """Have all ended, those by force that do not end within some seconds."""
        if seconds >= END_SECONDS:
            self._ray.wait(self._results, num_returns=len(self._results), timeout=seconds)
        for actor in self._actors:
            self._ray.kill(actor)
        if self._starts:
            self._ray.shutdown()

    def wait(self, rank: int) -> str | None:
        """Wait for one to end, and say why it did; None when it left as it should."""
        try:
            self._ray.get(self._results[rank - 1])
        except self._ray.exceptions.RayError as error:
            return f"on Ray ended: {str(error).splitlines()[-1]}"


class _Follower:
    """One of the other processes, on Ray."""

    def follow(self, terms: Mapping[str, Any], host: str, port: int, rank: int) -> None:
        from .follower import run_rank
        from .join import Terms

        run_rank(Terms(**terms), host=host, port=port, rank=rank, local_rank=0)


def _ray() -> Any:
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise missing_extra(error.name or "ray", "ray") from error
    return ray
