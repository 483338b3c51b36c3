"""Resolve models that are another run's weights: their version, digest and folder."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ...store import Store
from ...store.errors import JobError
from ..config import RunConfig
from ..config.base import Section
from ..config.model import FrozenModel
from ..models.weights import check_weights
from ..runs.job import newest_config, run_folder
from .subscriber import find_version

S = TypeVar("S", bound=Section)
Find = Callable[[FrozenModel, Mapping[str, Any]], dict[str, Any]]
"""Given a model that names a run, and its stored configuration, returns the fields to change."""


def resolve_run_models(store: Store, config: RunConfig) -> RunConfig:
    """Return the configuration with version, digest and folder of each model that names a `run`.

    A resumed run keeps the versions that it was started with. Raises ConfigError if the weights do
    not exist, JobError if they have changed.
    """

    def find(model: FrozenModel, before: Mapping[str, Any]) -> dict[str, Any]:
        if model.path is not None:  # resolved before
            return {}
        run = model.run or ""
        folder = run_folder(store, config.model_copy(update={"name": run}))
        found = find_version(store, folder, run, _pins(model, before)["version"])
        check_weights(found)
        if model.digest not in (None, found.digest):
            raise JobError(
                f"the weights `{model.run}:{found.version}` have digest {found.digest}, expected "
                f"{model.digest}: that run was trained anew"
            )
        return {"version": found.version, "digest": found.digest, "path": str(found.folder)}

    named: list[FrozenModel] = []
    _changed(config, {}, lambda model, _: named.append(model) or {})
    if not named:  # nothing to look up, and so nothing to read of the store
        return config
    return _changed(config, json.loads(newest_config(store, config.name) or "{}"), find)


def with_recorded_versions(config: RunConfig, stored: str) -> RunConfig:
    """Return the configuration with the versions of other runs' weights from a stored one."""
    return _changed(config, json.loads(stored), _pins)


def _pins(model: FrozenModel, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return version and digest of a model; the stored ones if the configuration has none."""
    then = before if before.get("run") == model.run else {}
    # Another version than before: the stored digest is not that of this one.
    if model.version not in (None, then.get("version")):
        then = {}
    return {
        "version": then.get("version") if model.version is None else model.version,
        "digest": model.digest or then.get("digest"),
    }


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
