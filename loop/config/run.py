"""The whole tree, and what must fit together across its parts."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import Field, ValidationError, model_validator

from ...store.errors import ConfigError, nearest
from .base import Int, Section
from .callables import check_importable, named
from .evaluate import EvaluateConfig
from .explorer import ExplorerConfig
from .former_keys import current
from .load import override, read
from .model import ModelConfig
from .ray import RayConfig
from .schedule import ScheduleConfig
from .serve import ServeConfig
from .tasks import DataConfig, TasksConfig
from .trackers import TrackerSpecs
from .trainer import TrainerConfig


class RunConfig(Section):
    """All of a run; a function of Python may stand wherever YAML names one.

    >>> config = RunConfig.from_yaml("grpo_digits", ["trainer.steps=5"])
    >>> config.trainer.steps
    5
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Names the run: its rows, its folder. A run is continued with `--resume`."""
    seed: Int = Field(default=0, ge=0)
    store: str | None = None
    """Folder or address of the store; `--store` and RLAKE_STORE say it too."""
    output: str | None = None
    """Folder for checkpoints and weights; None: `runs/` in the store's folder."""
    threads: Int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of torch in each job; None: what torch chooses."""
    model: ModelConfig
    algorithm: str | dict[str, dict[str, Any]]
    """Name of an algorithm, or `{name: {parameter: value}}`."""
    tasks: TasksConfig = TasksConfig()
    data: DataConfig = DataConfig()
    explorer: ExplorerConfig | None = None
    """Left out: the run is offline, and trains on what is stored."""
    schedule: ScheduleConfig = ScheduleConfig()
    ray: RayConfig | None = None
    """Explorers on Ray; left out: one, in the process of the command."""
    trainer: TrainerConfig = TrainerConfig()
    evaluate: EvaluateConfig | None = None
    serve: ServeConfig | None = None
    """How `rlake serve` answers with the run's policy."""
    trackers: TrackerSpecs = ()
    """Experiment trackers that are told all metrics too, as `[tensorboard, {wandb: {}}]`."""

    @classmethod
    def from_yaml(cls, source: str | Path, overrides: Sequence[str] = ()) -> "RunConfig":
        """Read a YAML file or a packaged recipe's name, with `a.b=c` overrides; see `load`."""
        return load(source, overrides)

    @model_validator(mode="before")
    @classmethod
    def _with_names(cls, value: Any) -> Any:
        return named(value)

    @model_validator(mode="after")
    def _travels(self) -> Self:
        """Refuse functions that the processes of the run cannot import."""
        if self.ray is not None:
            check_importable(self.model_dump(mode="json"), "Ray")
        elif (self.trainer.distributed.world_size or 1) > 1:
            trained = self.model_dump(mode="json", include={"algorithm", "trainer"})
            check_importable(trained, "each process of the training")
        return self

    @model_validator(mode="after")
    def _measured(self) -> Self:
        """Refuse measurements in the run that no explorer can make, and a best that nobody does."""
        evaluate, explorer, every = self.evaluate, self.explorer, None
        if evaluate is not None and (every := evaluate.every_steps) is not None:
            steps = self.schedule.publish_every
            if explorer is None:
                raise ValueError(
                    "evaluate.every_steps is for runs with an explorer, whose engine "
                    "samples; measure "
                    "this one by `rlake evaluate`, or its loss by trainer.eval_where"
                )
            if explorer.engine.endpoint is not None:
                raise ValueError(
                    "evaluate.every_steps measures the run's weights, and explorer.engine is "
                    "an endpoint "
                    "with its own; take another engine, or leave it out"
                )
            if every % steps:
                raise ValueError(
                    f"evaluate.every_steps is {every}, and weights are published every "
                    f"{steps} steps; "
                    f"take a multiple of schedule.publish_every, as {every - every % steps + steps}"
                )
        best = self.trainer.keep_checkpoints.best
        if best is None or not best.startswith("eval/") or self.measures(best):
            return self
        if every is not None and evaluate is not None and self.trainer.eval_where is None:
            raise ValueError(
                f"trainer.keep_checkpoints names the metric `{best}`, which `evaluate` does not "
                f"measure{nearest(best, evaluate.metrics)}; it has {', '.join(evaluate.metrics)}"
            )
        if self.trainer.eval_where is None:
            raise ValueError(
                f"`{best}` is measured on `trainer.eval_where`, or by `evaluate.every_steps`; "
                "set one of them"
            )
        return self

    def measures(self, metric: str) -> bool:
        """Tell whether the explorer measures this of the policy while the run goes on."""
        evaluate = self.evaluate
        return (
            evaluate is not None and evaluate.every_steps is not None and metric in evaluate.metrics
        )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.explorer is None:
            return self._offline()
        if self.schedule.weight_transport == "memory" and self.ray and self.ray.trainer:
            raise ValueError(
                "schedule.weight_transport is memory, and ray.trainer places the trainer in "
                "a process "
                "of its own; take store or broadcast"
            )
        trainer = self.trainer
        if trainer.steps is None:
            raise ValueError("trainer.steps is missing; a run with an explorer needs it")
        if trainer.source is not None or trainer.at is not None:
            key = "source" if trainer.source is not None else "at"
            raise ValueError(
                f"trainer.{key} is for runs on what is stored; take the `explorer` section away, "
                "or make it a source of `sampler: {mixed: ...}`"
            )
        mixed = trainer.sampler.mixed
        own = [name for name, source in (mixed or {}).items() if not source.is_stored]
        if mixed is not None and (len(own) != 1 or trainer.max_uses != 1):
            raise ValueError(
                f"trainer.sampler.mixed has {len(own)} sources of the run's own rows, and max_uses "
                f"{trainer.max_uses}; beside an explorer exactly one source has neither "
                "`run`, `at` "
                "nor `source`, and `max_uses` is said for each source"
            )
        if self.is_replay and self.schedule.max_lag is None:
            raise ValueError(
                "schedule.max_lag is missing: a run that draws rows again must say how old they "
                "may be, in optimizer steps"
            )
        return self

    def _offline(self) -> Self:
        if self.schedule.new_units_per_step is not None:
            raise ValueError("schedule.new_units_per_step is for runs with an explorer")
        if self.ray is not None:
            raise ValueError("ray is for runs with an explorer")
        return self

    @property
    def is_replay(self) -> bool:
        """Whether rows that the explorer made may be drawn in other steps than their own."""
        if self.explorer is None:
            return False
        if self.trainer.sampler.mixed is None:
            return not self.trainer.draws_once
        own = next(s for s in self.trainer.sampler.mixed.values() if not s.is_stored)
        return own.sampler.fifo is None or (own.max_uses or 1) > 1


_LONGEST, _LONGEST_MESSAGE = 200, 2000
"""Characters of a wrong value that a message shows, and of a message."""


def load(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration: a YAML file or a packaged recipe's name, with `a.b=c` overrides.

    One with `extends: NAME` or a file, relative to its own folder, is merged key by key over that
    one, which may extend another. What is chosen by a name, as the algorithm, is replaced as a
    whole; null takes a section away.

    Raises ConfigError for a file that is not there, an unknown key (with the nearest known one), or
    a value of the wrong type.
    """
    tree = read(source)
    if "stages" in tree:
        raise ConfigError(
            f"`{source}` runs in stages: `rlake run` runs them in order; name one of "
            f"{', '.join(tree['stages'] or ())} with `--stage`"
        )
    for change in overrides:
        override(tree, change)
    return build(tree)


def build(tree: Mapping[str, Any]) -> RunConfig:
    """Check a tree of plain values and return the configuration."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def _explain(error: ValidationError) -> str:
    """Say the first thing that is wrong, in our words."""
    errors = error.errors()
    key = errors[0]["loc"][:1]
    # of a value that may have several types, the type that fits best fails deepest in the tree
    first = max(
        (e for e in errors if e["loc"][:1] == key),
        key=lambda e: (len(e["loc"]), e["type"] == "extra_forbidden"),
    )
    where = ".".join(str(p) for p in first["loc"] if p != "str" and not str(p).startswith("dict["))
    if first["type"] == "extra_forbidden":
        section = _section(first["loc"][:-1])
        if (now := current(where, section.model_fields)) is not None:
            return f"`{where}` is unknown; it is called `{now}`"
        return f"unknown key `{where}`{nearest(str(first['loc'][-1]), section.model_fields)}"
    if first["type"] == "missing":
        return f"key `{where}` is missing; add it to the configuration"
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    message = message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."
    got = "" if first["type"] == "value_error" else f", got {_short(first['input'])}"
    return f"`{where}`: {message}{got}" if where else message


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."


def _section(path: Sequence[int | str]) -> type[Section]:
    """Return the class that describes the part of the tree at `path`."""
    section: type[Section] = RunConfig
    for name in path:
        if name in section.model_fields:  # else it is a name of the user's, as in `mix`
            inner = _sections(section.model_fields[str(name)].annotation)
            section = next(inner, section)
    return section


def _sections(kind: Any) -> Iterator[type[Section]]:
    """Yield the sections that a type is made of."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    for part in get_args(kind):
        yield from _sections(part)
