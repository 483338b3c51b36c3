"""Multi-stage configurations: named stages, each merged over the keys that all of them share.

`stages` is a mapping, in the order in which they run: a stage is addressed by its name
(`--set stages.learn.trainer.steps=50`, `--stage learn`), and `extends` merges stage by stage.

    name: demo
    model: {from_scratch: {}}
    stages:
      warm_start: {algorithm: sft, trainer: {where: source = 'expert'}}
      learn: {algorithm: grpo, explorer: {rewards: exact_match}, trainer: {steps: 80}}
      measure: {evaluate: {group_size: 4}}

A stage that trains is a run of its own, `demo.learn`, and starts from the last weights of the stage
before, unless it sets `model.path`, `model.from_scratch` or `model.run`. A stage with only
`evaluate` evaluates the run before it (or, as the first, the model that training starts from); a
stage with `pipeline` runs a pipeline, given as a file or inline.
"""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...store.errors import ConfigError, nearest
from .load import merged, override, read
from .run import RunConfig, build

ORIGINS = ("path", "from_scratch", "run")
"""Keys of `model` that say where it comes from; one of them is set."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Stage:
    """One stage of a configuration."""

    name: str
    kind: Literal["train", "evaluate", "pipeline"]
    whole: str
    """The name of the whole configuration."""
    config: RunConfig
    """The configuration of the run that the stage is, or that it evaluates."""
    model: str | None = None
    """A model folder to evaluate instead of the run's weights."""
    pipeline: str | dict[str, Any] | None = None
    """A file, or the content of one without its name."""

    @property
    def label(self) -> str:
        """The name of the configuration, and of the stage."""
        return f"{self.whole}.{self.name}"


def load_stages(source: str | Path, overrides: Sequence[str] = ()) -> tuple[Stage, ...]:
    """Read the stages of a configuration; a configuration without stages gives an empty tuple.

    An override of a stage's key, `stages.learn.trainer.steps=50`, changes that stage; any other
    override changes all of them, and wins over what they set themselves.
    """
    tree = read(source)
    own = [change for change in overrides if change.strip().startswith("stages.")]
    for change in own:
        override(tree, change)
    if tree.get("stages") is None:
        return ()
    return build_stages(tree, [change for change in overrides if change not in own])


def build_stages(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> tuple[Stage, ...]:
    """Check a tree of plain values with `stages`, and return the stages in their order."""
    tree = deepcopy(dict(tree))  # overrides change it in place
    shared = {key: value for key, value in tree.items() if key != "stages"}
    for change in overrides:
        override(shared, change)
    parts = {str(name): _part(name, part) for name, part in _parts(tree).items()}
    kinds = {name: _kind(part, shared) for name, part in parts.items()}
    trained = [name for name, kind in kinds.items() if kind == "train"]
    if not trained:
        raise ConfigError(f"none of the stages {', '.join(parts)} trains; give one an `algorithm`")
    whole = shared.get("name")
    changes = [change for change in overrides if not change.startswith(("name=", "model."))]
    configs: dict[str, dict[str, Any]] = {}
    for name in trained:
        made = merged(_changed(shared, parts[name]), {"name": f"{whole}.{name}"})
        configs[name] = _started(made, parts[name], after=next(reversed(configs), None), of=whole)
        _apply(configs[name], changes)
    found, last = [], trained[0]
    for name, part in parts.items():
        last = name if name in configs else last
        found.append(_stage(name, kinds[name], part, configs[last], changes, str(whole)))
    return tuple(found)


def of_name(stages: Sequence[Stage], name: str) -> Stage:
    """Return the stage with this name; ConfigError with the nearest name if it does not exist."""
    found = {stage.name: stage for stage in stages}
    if name not in found:
        raise ConfigError(f"stage `{name}` does not exist{nearest(name, found)}")
    return found[name]


def _parts(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = tree["stages"]
    if not isinstance(parts, Mapping) or not parts:
        raise ConfigError(
            "`stages` must be names with what each stage says, as `learn: {algorithm: grpo}`, got "
            f"{parts!r}"
        )
    return parts


def _part(name: object, part: object) -> dict[str, Any]:
    if not _NAME.fullmatch(str(name)):
        raise ConfigError(
            f"`stages.{name}`: a name is of letters, digits, `_` and `-`, since it ends a run's"
        )
    if part is not None and not isinstance(part, Mapping):
        raise ConfigError(f"`stages.{name}` must hold keys and values, got {part!r}")
    refused = {"name", "store", "output", "stages", "extends"} & set(part or ())
    if refused:
        raise ConfigError(f"`stages.{name}.{min(refused)}` is for all stages; write it above them")
    return dict(part or {})


def _kind(part: Mapping[str, Any], shared: Mapping[str, Any]) -> Any:
    if "pipeline" in part:
        return "pipeline"
    has_algorithm = part.get("algorithm", shared.get("algorithm")) is not None
    return "train" if has_algorithm and set(part) - {"evaluate", "model"} else "evaluate"


def _changed(shared: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    # A model from another source replaces the shared one, whose source would otherwise remain.
    if _origin(part) is not None:
        nothing = dict.fromkeys(ORIGINS)
        part = {**part, "model": {**nothing, **part["model"]}}
    return merged(shared, part)


def _origin(part: Mapping[str, Any]) -> Any:
    model = part.get("model") or {}
    return next((model[key] for key in ORIGINS if model.get(key) is not None), None)


def _started(
    tree: dict[str, Any], part: Mapping[str, Any], *, after: str | None, of: object
) -> dict[str, Any]:
    if after is None or _origin(part) is not None:
        return tree
    origin = dict.fromkeys(ORIGINS) | {"run": f"{of}.{after}"}
    return tree | {"model": {**(tree.get("model") or {}), **origin}}


def _apply(tree: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    for change in changes:
        override(tree, change)
    return tree


def _stage(
    name: str,
    kind: Any,
    part: Mapping[str, Any],
    tree: Mapping[str, Any],
    changes: Sequence[str],
    whole: str,
) -> Stage:
    try:
        if kind == "train":
            return Stage(name, kind, whole, build(tree))
        if kind == "pipeline":
            return Stage(name, kind, whole, build(tree), pipeline=_pipeline(part))
        settings = {key: value for key, value in part.items() if key != "model"}
        made = merged(tree, {**settings, "algorithm": tree["algorithm"]})
        return Stage(name, kind, whole, build(_apply(made, changes)), model=_model_folder(part))
    except ConfigError as error:
        raise ConfigError(f"stage `{name}`: {error}") from error


def _pipeline(part: Mapping[str, Any]) -> Any:
    others = set(part) - {"pipeline"}
    if others:
        raise ConfigError(f"`{min(others)}` is not for a stage that runs a `pipeline`")
    return part["pipeline"]


def _model_folder(part: Mapping[str, Any]) -> str | None:
    model = dict(part.get("model") or {})
    path = model.pop("path", None)
    if model:
        raise ConfigError(
            f"`model.{min(model)}`: a stage that evaluates takes the weights of the run before it, "
            "or `model.path`"
        )
    return path
