"""`rlake serve`: engines, the application, and the run's new weights, until a signal."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...store import Store
from ...store.errors import ConfigError, missing_extra
from ..chat_api.app import create_app, new_sessions
from ..chat_api.metrics import ServingMetrics
from ..config import ExplorerConfig, RunConfig
from ..config.serve import ServeConfig
from ..inference.build import close, start_auxiliary, start_policy
from ..inference.chat_policy import ChatPolicy
from ..inference.endpoint.policy import EndpointPolicy
from ..inference.policy import Policy
from ..models.atomic_folder import save_model
from ..models.load import load
from ..rollouts.setup import sampling as sampling_of
from ..runs.job import Job, Watch, run_folder
from ..weight_sync import PublishedWeights, WeightSubscriber, fetch
from ..weight_sync.run_models import resolve_run_models
from .connections import bounded, most_connections
from .feedback import Feedback
from .load_balancer import ExternalModelPolicy, LoadBalancedPolicy
from .store_writer import StoreWriter

try:
    import uvicorn
except ImportError as error:
    raise missing_extra("uvicorn", "serve") from error

HEADER_BYTES = 64 << 10
"""Most bytes of the headers of a request."""

_log = logging.getLogger(__name__)


@dataclass
class Server:
    """Serves the policy of a run, and stores its conversations."""

    store: Store
    config: RunConfig
    settings: ServeConfig
    token: str | None = None
    feedback_token: str | None = None

    def __post_init__(self) -> None:
        self._own = self.settings.model or self.config.name
        if self._own in self.settings.models:
            raise ConfigError(
                f"two models are called `{self._own}`, one of them the policy; set `serve.model` "
                "to another name for it"
            )
        self.metrics = ServingMetrics()
        self._job = Job(self.store, self.config, "serve", 1, run_folder(self.store, self.config))
        self._subscriber = WeightSubscriber(self._job, Watch(self._job))
        # one thread: the subscriber keeps state that concurrent calls would corrupt
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="rlake-weights")
        started = self._reader.submit(self._subscriber.latest).result()
        self.policies = self._engines(started)
        self._auxiliary = start_auxiliary(
            self.settings.models, seed=self.config.seed, store=self.store
        )
        self._serves = (started.version, started.digest) if started else None

    def run(self, listening: socket.socket, *, ready: Callable[[int], None]) -> None:
        """Serve until a signal stops it: requests under way are finished, and rows stored.

        `ready` is called with the number of sessions recovered when it answers.
        """
        limits = self.settings.limits
        most = most_connections(limits)
        writer = StoreWriter(
            self.store,
            self._job.folder / "serve",
            run_id=f"{self.config.name}:serve",
            metrics=self.metrics,
            store_seconds=self.settings.commit_interval,
            unstored_bytes=limits.unstored_bytes,
        )
        sessions = new_sessions(writer, self.settings)
        app = create_app(
            self._models(),
            settings=self.settings,
            token=self.token,
            feedback_token=self.feedback_token,
            answered=writer.answered,
            feedback=Feedback(self.store, sessions, writer),
            metrics=self.metrics,
            sessions=sessions,
            check=writer.check,
        )
        config = uvicorn.Config(
            app,
            http=bounded(limits, most=most),
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(limits.shutdown_seconds)),
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        for name in (signal.SIGTERM, signal.SIGINT):
            # uvicorn raises the signal that stopped it again, after its shutdown
            signal.signal(name, lambda *_: None)
        try:
            asyncio.run(
                self._serve(uvicorn.Server(config), listening, lambda: ready(writer.recovered))
            )
        finally:
            if not writer.close(seconds=limits.shutdown_seconds):
                _log.error("not all rows were stored in time; the next server stores them")

    async def _serve(
        self, server: uvicorn.Server, listening: socket.socket, ready: Callable[[], None]
    ) -> None:
        follows = asyncio.create_task(self._follow())
        reports = asyncio.create_task(_when_started(server, ready))
        try:
            await server.serve(sockets=[listening])
        finally:
            reports.cancel()
            follows.cancel()
            await asyncio.gather(follows, return_exceptions=True)
            await close([*self._policies, *self._auxiliary.values()])
            self._reader.shutdown()

    async def _follow(self) -> None:
        """Load weights as the run publishes them; requests under way continue."""
        loop = asyncio.get_running_loop()
        while self.settings.follow and self.policies:
            try:
                found = await loop.run_in_executor(self._reader, self._subscriber.latest)
                if found is not None and (found.version, found.digest) != self._serves:
                    await self._swap(found)
            except Exception as error:  # noqa: BLE001 - the old weights serve until the next attempt
                self.metrics.swap_failures.inc()
                _log.error("new weights could not be loaded: %s", error)
            await asyncio.sleep(self.settings.poll_interval)

    async def _swap(self, found: PublishedWeights) -> None:
        weights = await fetch(found)
        for policy in self.policies:
            await policy.engine.swap(weights)
            self.metrics.swaps.inc()
        self._serves = (found.version, found.digest)

    def _models(self) -> Mapping[str, Policy]:
        served: dict[str, Policy] = {self._own: LoadBalancedPolicy(self._policies)}
        return served | {
            name: ExternalModelPolicy(policy, name) for name, policy in self._auxiliary.items()
        }

    def _engines(self, started: PublishedWeights | None) -> list[ChatPolicy]:
        explorer = self.config.explorer or ExplorerConfig()
        engine = self.settings.engine or explorer.engine
        chosen = sampling_of(self.settings.sampling or explorer.sampling)
        if self.config.threads:
            import torch

            torch.set_num_threads(self.config.threads)
        here = Path() if engine.endpoint is not None else self._folder(started)
        self._policies: list[ChatPolicy | EndpointPolicy] = [
            start_policy(engine, here, self.config.model, sampling=chosen, store=self.store)
            for _ in range(self.settings.engines)
        ]
        own = [policy for policy in self._policies if isinstance(policy, ChatPolicy)]
        if started is not None:
            for policy in own:
                asyncio.run(policy.engine.swap(started))
        return own

    def _folder(self, started: PublishedWeights | None) -> Path:
        """Return the folder of the run's newest model, or of the model that it starts from."""
        if started is not None and started.file.is_file():
            return started.folder
        model = resolve_run_models(self.store, self.config).model
        if model.path is not None:
            return Path(model.path)
        from transformers.utils import logging as progress

        progress.disable_progress_bar()
        folder = self._job.folder / "serve" / ".start"
        network, tokenizer = load(model, seed=self.config.seed)
        save_model(network, tokenizer, folder)
        return folder


async def _when_started(server: uvicorn.Server, ready: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)  # uvicorn has no event for it
    ready()
