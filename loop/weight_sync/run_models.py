"""Models that are another run's weights: which version that is, and where it lies."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ...store import Store
from ...store.errors import ConfigError, JobError, NotFoundError, nearest
from ...store.query import literal
from ..config import RunConfig
from ..config.base import Section
from ..config.model import FrozenModel
from ..runs.job import run_folder
from . import PublishedWeights, check_weights, published

S = TypeVar("S", bound=Section)
Find = Callable[[FrozenModel, Mapping[str, Any]], dict[str, Any]]
"""Given a model that is a run's weights, and what was stored of it, returns what changes."""


def resolve_run_models(store: Store, config: RunConfig) -> RunConfig:
    """Return the configuration with version, digest and folder of each model that names a `run`.

    A run that was started before keeps the versions that it was started with. Raises ConfigError
    when there are no such weights, JobError when they are not what they were.
    """

    def find(model: FrozenModel, before: Mapping[str, Any]) -> dict[str, Any]:
        if model.path is not None:  # it was located already
            return {}
        found = _weights(store, config, model.run or "", _pins(model, before)["version"])
        if model.digest not in (None, found.digest):
            raise JobError(
                f"the weights `{model.run}:{found.version}` have digest {found.digest}, expected "
                f"{model.digest}: that run was trained anew"
            )
        return {"version": found.version, "digest": found.digest, "path": str(found.folder)}

    return _changed(config, _stored(store, config.name), find)


def with_recorded_versions(config: RunConfig, stored: str) -> RunConfig:
    """Return the configuration with the versions of other runs' weights that a stored one has."""
    return _changed(config, json.loads(stored), _pins)


def _pins(model: FrozenModel, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return version and digest of a model, those of before where the configuration has none."""
    then = before if before.get("run") == model.run else {}
    if model.version not in (None, then.get("version")):
        then = {}
    return {
        "version": then.get("version") if model.version is None else model.version,
        "digest": model.digest or then.get("digest"),
    }


def _stored(store: Store, run_id: str) -> Mapping[str, Any]:
    """Return the newest configuration that a run was trained with."""
    rows = store.sql(
        f"SELECT config FROM job_events WHERE run_id = {literal(run_id)} AND job <> 'evaluate' "
        "ORDER BY created_at DESC LIMIT 1"
    ).fetchall()
    return json.loads(rows[0][0]) if rows else {}


def _changed(section: S, before: Mapping[str, Any], find: Find) -> S:
    changes: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            changes[name] = _changed(value, before.get(name) or {}, find)
        elif isinstance(value, dict) and any(isinstance(v, FrozenModel) for v in value.values()):
            then = before.get(name) or {}
            changes[name] = {k: _changed(v, then.get(k) or {}, find) for k, v in value.items()}
    if isinstance(section, FrozenModel) and section.run is not None:
        changes |= find(section, before)
    return section.model_copy(update=changes)


def _weights(store: Store, config: RunConfig, run: str, version: int | None) -> PublishedWeights:
    folder = run_folder(store, config.model_copy(update={"name": run}))
    found = published(store, folder, run)
    if not found:
        known = [r for (r,) in store.sql("SELECT DISTINCT run_id FROM policies").fetchall()]
        raise NotFoundError(
            f"run `{run}` has published no weights to start from; train it first"
            f"{nearest(run, known)}"
        )
    weights = found.get(max(found) if version is None else version)
    if weights is None:
        raise ConfigError(
            f"run `{run}` has no weights of version {version}; there are {sorted(found)}"
        )
    check_weights(weights)
    return weights
