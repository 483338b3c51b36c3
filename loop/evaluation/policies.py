"""The policies to evaluate: versions of a run, model folders, endpoints; and their engines."""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ...operators.concurrency import run_apart
from ...store import Store
from ...store.errors import ConfigError
from ..config import EngineConfig, ExplorerConfig, RunConfig
from ..inference.build import close, in_process, start_auxiliary, start_policy
from ..inference.chat_policy import ChatPolicy
from ..inference.policy import Policy, Sampling
from ..models.atomic_folder import save_model
from ..models.load import check_place, load
from ..runs.job import run_folder
from ..weight_sync import PublishedWeights, published
from ..weight_sync.run_models import resolve_run_models

if TYPE_CHECKING:
    from ..inference.endpoint.policy import EndpointPolicy

P = TypeVar("P", bound="ChatPolicy | EndpointPolicy")


@dataclass(frozen=True, kw_only=True)
class EvaluatedPolicy:
    """A policy to evaluate; without version and model, the model that the run starts from."""

    version: int | None = None
    model: str | None = None
    """A folder or hub name, or the name of an endpoint's model."""
    weights: PublishedWeights | None = None
    """The version's weights."""

    @property
    def label(self) -> str:
        """The name that reports use."""
        return self.model or f"version {self.version or 0}"


def subject(
    store: Store, config: RunConfig, version: int | None, model: str | Path | None
) -> EvaluatedPolicy:
    """Return the run's newest policy, another version, or a model.

    Raises ConfigError for a version that no longer exists.
    """
    endpoint = engine_of(config).endpoint
    if model is not None:
        check_place(model)
        place = Path(model)
        # Absolute, because rows name the model in their metadata, whoever reads them.
        return EvaluatedPolicy(model=str(place.absolute() if place.exists() else model))
    if endpoint is not None:
        return EvaluatedPolicy(model=endpoint.model)
    found = versions(store, config)
    if version is None and not found:
        return EvaluatedPolicy()
    wanted = max(found) if version is None and found else version
    if wanted is None or wanted not in found:
        raise ConfigError(
            f"run `{config.name}` has no weights of version {wanted}; there are {sorted(found)}"
        )
    return EvaluatedPolicy(version=wanted, weights=found[wanted])


def every_checkpoint(store: Store, config: RunConfig) -> list[EvaluatedPolicy]:
    """Return all versions of a run whose weights still exist; ConfigError without any."""
    found = versions(store, config)
    if not found:
        raise ConfigError(f"run `{config.name}` has no weights; train it first")
    return [EvaluatedPolicy(version=v, weights=found[v]) for v in sorted(found)]


def versions(store: Store, config: RunConfig) -> dict[int, PublishedWeights]:
    """Return the versions of a run whose weights still exist."""
    found = published(store, run_folder(store, config), config.name)
    return {v: weights for v, weights in found.items() if weights.folder.is_dir()}


def engine_of(config: RunConfig) -> EngineConfig:
    """Return the engine that an evaluation samples with."""
    own = None if config.evaluate is None else config.evaluate.engine
    return own or (config.explorer or ExplorerConfig()).engine


class PolicyPool:
    """Serves policies one after the other; versions of a run share an engine."""

    def __init__(self, store: Store, config: RunConfig, *, sampling: Sampling) -> None:
        self._store, self._config, self._sampling = store, config, sampling
        self._shared: ChatPolicy | None = None
        self._others: dict[str, ChatPolicy | EndpointPolicy] | None = None
        self._started: list[ChatPolicy | EndpointPolicy] = []
        self._folders = ExitStack()

    @property
    def others(self) -> Mapping[str, Policy]:
        """The auxiliary models that the workflow calls."""
        if self._others is None:
            models = (self._config.explorer or ExplorerConfig()).auxiliary_models
            self._others = start_auxiliary(models, seed=self._config.seed, store=self._store)
        return self._others

    def policy(self, subject: EvaluatedPolicy) -> "ChatPolicy | EndpointPolicy":
        """Return a subject's policy, which is valid until the next call."""
        if subject.weights is None:
            return self._other(subject)
        if self._shared is None:
            self._shared = self._start(subject.weights.folder)
        run_apart(self._shared.engine.swap(subject.weights))
        return self._shared

    def close(self) -> None:
        """Free all engines."""
        # Engines first: they were started from the temporary folders.
        run_apart(close([*self._started, *(self._others or {}).values()]))
        self._folders.close()

    def _other(self, subject: EvaluatedPolicy) -> "ChatPolicy | EndpointPolicy":
        if engine_of(self._config).endpoint is not None:
            return self._begin(Path())
        if subject.model is not None:
            return self._start(Path(subject.model))
        model = resolve_run_models(self._store, self._config).model
        if model.path is not None:
            return self._start(Path(model.path))
        network, tokenizer = load(model, seed=self._config.seed)
        engine = engine_of(self._config)
        if engine.transformers is not None:
            made = in_process(
                network, tokenizer, engine, model, sampling=self._sampling, store=self._store
            )
            return self._kept(made)
        folder = self._folders.enter_context(tempfile.TemporaryDirectory())
        save_model(network, tokenizer, Path(folder))
        return self._start(Path(folder))

    def _start(self, folder: Path) -> ChatPolicy:
        made = self._begin(folder)
        if not isinstance(made, ChatPolicy):
            raise ConfigError("an endpoint answers with its own model; leave `--model` out")
        return made

    def _begin(self, folder: Path) -> "ChatPolicy | EndpointPolicy":
        config = self._config
        engine = engine_of(config)
        return self._kept(
            start_policy(engine, folder, config.model, sampling=self._sampling, store=self._store)
        )

    def _kept(self, policy: P) -> P:
        self._started.append(policy)
        return policy


def with_models(store: Store, config: RunConfig) -> RunConfig:
    """Return the configuration with the weights of what it evaluates with: models of other runs."""
    return resolve_run_models(store, config, within=("explorer", "tasks", "evaluate"))
