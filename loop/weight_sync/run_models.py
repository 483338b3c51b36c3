"""Resolve models that are another run's weights: their version, digest and folder."""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ...operators import rewards
from ...operators.import_path import find_function
from ...operators.reward_protocol import Spec
from ...store import Store
from ...store.errors import ConfigError, JobError
from ..config import RunConfig
from ..config.base import Section
from ..config.model import FrozenModel
from ..models.weights import check_weights
from ..runs.job import newest_config, run_folder
from .subscriber import find_version

S = TypeVar("S", bound=Section)
Find = Callable[[FrozenModel, Mapping[str, Any]], dict[str, Any]]
"""Given a model that names a run, and its stored configuration, returns the fields to change."""


def resolve_run_models(
    store: Store, config: RunConfig, *, within: Collection[str] | None = None
) -> RunConfig:
    """Return the configuration with version, digest and folder of each model that names a `run`.

    Models are those of sections, and of the reward `reward_model`; `within` limits the sections. A
    resumed run keeps the versions that it was started with. Raises ConfigError if the weights do
    not exist, JobError if they have changed.
    """

    def find(model: FrozenModel, before: Mapping[str, Any]) -> dict[str, Any]:
        folder = run_folder(store, config.model_copy(update={"name": model.run or ""}))
        return _found(store, folder, model, before)

    named: list[FrozenModel] = []
    _changed(config, {}, lambda model, _: named.append(model) or {}, within)
    if not named:  # nothing to look up, and so nothing to read of the store
        return config
    before = json.loads(newest_config(store, config.name) or "{}")
    return _changed(config, before, find, within)


def resolve_reward(store: Store, reward: Spec) -> Spec:
    """Return a reward with version, digest and folder of the run of the store that it names.

    Raises what `resolve_run_models` does, and ConfigError if the store is not a local folder.
    """
    if isinstance(reward, str):
        return reward

    def find(model: FrozenModel, before: Mapping[str, Any]) -> dict[str, Any]:
        if store.runs_folder is None:
            raise ConfigError("the store is not a local folder; give `path` in place of `run`")
        return _found(store, store.runs_folder / (model.run or ""), model, before)

    return {name: _in_reward(name, given, {}, find) for name, given in reward.items()}


def _found(
    store: Store, folder: Path, model: FrozenModel, before: Mapping[str, Any]
) -> dict[str, Any]:
    if model.path is not None:  # resolved before
        return {}
    found = find_version(store, folder, model.run or "", _pins(model, before)["version"])
    check_weights(found)
    if model.digest not in (None, found.digest):
        raise JobError(
            f"the weights `{model.run}:{found.version}` have digest {found.digest}, expected "
            f"{model.digest}: that run was trained anew"
        )
    return {"version": found.version, "digest": found.digest, "path": str(found.folder)}


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


def _changed(
    section: S, before: Mapping[str, Any], find: Find, within: Collection[str] | None = None
) -> S:
    changes: dict[str, Any] = {}
    for name in within or type(section).model_fields:
        value, then = getattr(section, name), before.get(name) or {}
        if isinstance(value, Section):
            changes[name] = _changed(value, then, find)
        elif name == "rewards" and isinstance(value, dict):
            then = then if isinstance(then, dict) else {}
            changes[name] = {k: _in_reward(k, v, then.get(k), find) for k, v in value.items()}
        elif isinstance(value, dict) and any(isinstance(v, Section) for v in value.values()):
            changes[name] = {k: _changed(v, then.get(k) or {}, find) for k, v in value.items()}
    if isinstance(section, FrozenModel) and section.run is not None:
        changes |= find(section, before)
    return section.model_copy(update=changes)


def _in_reward(name: str, given: Any, before: Any, find: Find) -> Any:
    """Return the parameters of a reward, with those of the run's model that it names."""
    if not isinstance(given, Mapping) or given.get("run") is None:
        return given
    if find_function(name, rewards, "reward") is not rewards.reward_model:
        return given
    keys = ("path", "run", "version", "digest")
    model = FrozenModel.model_construct(**{key: given.get(key) for key in keys})
    return {**given, **find(model, before if isinstance(before, Mapping) else {})}
