"""The whole configuration of a run, and the checks across its sections."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from ...store.errors import ConfigError, nearest, shorten
from .base import Int, Section
from .callables import check_importable, named
from .env_variables import Written, as_written, filled_in
from .evaluate import EvaluateConfig
from .expect import ExpectConfig
from .explorer import ExplorerConfig
from .former_keys import hint
from .load import override, read
from .model import ModelConfig
from .ray import RayConfig
from .schedule import ScheduleConfig
from .serve import ServeConfig
from .tasks import DataConfig, TasksConfig
from .trainer import TrainerConfig

TrackerSpec = str | dict[str, dict[str, Any] | None]
"""A tracker: `name`, or `{name: {parameter: value}}`; your own as `module:Class`."""


def _each_one(specs: tuple[TrackerSpec, ...]) -> tuple[TrackerSpec, ...]:
    for spec in specs:
        if not isinstance(spec, str) and len(spec) != 1:
            raise ValueError(
                f"each entry is one tracker, got {', '.join(spec) or 'none'}; write a list, as "
                "`[tensorboard, {wandb: {mode: offline}}]`"
            )
    return specs


TrackerSpecs = Annotated[tuple[TrackerSpec, ...], AfterValidator(_each_one)]


class RunConfig(Section):
    """The configuration of a run; Python functions are accepted wherever YAML names one.

    >>> config = RunConfig.from_yaml("grpo_digits", ["trainer.steps=5"])
    >>> config.trainer.steps
    5
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Name of the run, which identifies its rows and its folder; `--resume` continues it."""
    seed: Int = Field(default=0, ge=0)
    """Seed of all randomness in the run: initialization, sampling, draws, shuffling."""
    store: str | None = None
    """Folder or address of the store; `--store` and the variable RLAKE_STORE set it too."""
    output: str | None = None
    """Folder for checkpoints and weights; None: `runs/` in the store's folder."""
    threads: Int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of torch in each job; None: one for an explorer and a trainer of a model of less
    than about a million parameters, which several threads slow down, else torch's default."""
    model: ModelConfig
    """The policy that is trained."""
    algorithm: str | dict[str, dict[str, Any]]
    """Name of an algorithm, or `{name: {parameter: value}}`."""
    tasks: TasksConfig = TasksConfig()
    """The tasks that the explorer samples, and how they are selected."""
    data: DataConfig = DataConfig()
    """Rows that are stored before the run begins."""
    explorer: ExplorerConfig | None = None
    """How rollouts are generated.

    Without this section the run is offline and trains on stored rows.
    """
    schedule: ScheduleConfig = ScheduleConfig()
    """How far the explorer may run ahead of the trainer, and how old rows may be."""
    ray: RayConfig | None = None
    """Explorers on Ray; without this section one explorer runs in the command's process."""
    trainer: TrainerConfig = TrainerConfig()
    """How stored rows are drawn and trained on."""
    evaluate: EvaluateConfig | None = None
    """How policies are evaluated, during the run and by `rlake evaluate`."""
    serve: ServeConfig | None = None
    """How `rlake serve` serves the run's policy."""
    expect: ExpectConfig = ExpectConfig()
    """What must be true of the tasks before the run, and of the rows before each step."""
    trackers: TrackerSpecs = ()
    """Experiment trackers that also receive all metrics, such as `[tensorboard, {wandb: {}}]`."""

    @classmethod
    def from_yaml(cls, source: str | Path, overrides: Sequence[str] = ()) -> "RunConfig":
        """Read a YAML file or a packaged recipe's name, with `a.b=c` overrides; see `load`."""
        return load(source, overrides)

    _written: Written = PrivateAttr(default_factory=Written)

    def plain(self, **options: Any) -> dict[str, Any]:
        """Return plain values, with `${env:NAME}` as it was written; `options` are pydantic's."""
        return as_written(self.model_dump(mode="json", **options), self._written)

    @model_validator(mode="wrap")
    @classmethod
    def _from_environment(
        cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        """Fill in environment variables; a stored configuration may be read without them."""
        if isinstance(value, cls):
            return handler(value)
        written = Written()
        made = handler(filled_in(value, written, strict=info.mode != "json"))
        made._written = written
        return made

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
    def _fits_precision(self) -> Self:
        """Refuse flash attention without the precision that it computes in."""
        name = self.model.attention
        if self.trainer.precision == "float32" and name.startswith("flash_attention"):
            raise ValueError(
                f"`trainer.precision` is float32, in which flash attention does not compute, and "
                f"`model.attention` is {name}; set the precision to auto, or the attention to sdpa"
            )
        return self

    @model_validator(mode="after")
    def _routes(self) -> Self:
        """Refuse router replay where nothing records experts, or no router is here."""
        engine = None if self.explorer is None else self.explorer.engine
        if self.model.router_replay and engine is not None and engine.transformers is None:
            [name] = engine.model_dump(exclude_none=True)
            raise ValueError(
                f"model.router_replay needs the experts that an engine chose, and explorer.engine "
                f"is {name}, which does not report them here; set it to transformers, or "
                "router_replay to false"
            )
        is_used = self.model.router_replay or self.trainer.router_aux_loss_coef
        if is_used and self.trainer.backend.tinker is not None:
            raise ValueError(
                "model.router_replay and trainer.router_aux_loss_coef are for routers in this "
                "process, and trainer.backend is tinker; leave them out, or take torch"
            )
        return self

    @model_validator(mode="after")
    def _serves_one(self) -> Self:
        """Refuse several explorers at the same SGLang servers, which have one's weights."""
        if self.ray is None or self.explorer is None or self.explorer.engine.sglang is None:
            return self
        for key in ("num_explorers", "max_explorers"):
            if (getattr(self.ray, key) or 1) > 1:
                raise ValueError(
                    f"ray.{key} is {getattr(self.ray, key)}, and explorer.engine is sglang, whose "
                    "servers take the weights of one explorer; set it to 1, and name more servers "
                    "in `urls`"
                )
        return self

    @model_validator(mode="after")
    def _evaluations(self) -> Self:
        """Refuse evaluations that no explorer can make, and a best metric that is not evaluated."""
        evaluate, explorer, every = self.evaluate, self.explorer, None
        if evaluate is not None and (every := evaluate.every_steps) is not None:
            steps = self.schedule.publish_every
            if explorer is None:
                raise ValueError(
                    "evaluate.every_steps is for runs with an explorer, whose engine samples; "
                    "evaluate this one with `rlake evaluate`, or its loss with trainer.eval_where"
                )
            if explorer.engine.endpoint is not None:
                raise ValueError(
                    "evaluate.every_steps evaluates the run's weights, and explorer.engine is an "
                    "endpoint with its own; take another engine, or leave it out"
                )
            if every % steps:
                raise ValueError(
                    f"evaluate.every_steps is {every}, and weights are published every {steps} "
                    f"steps; take a multiple of schedule.publish_every, as "
                    f"{every - every % steps + steps}"
                )
        best = self.trainer.keep_checkpoints.best
        if best is None or not best.startswith("eval/") or self.evaluates(best):
            return self
        if every is not None and evaluate is not None and self.trainer.eval_where is None:
            raise ValueError(
                f"trainer.keep_checkpoints names the metric `{best}`, which `evaluate` does not "
                f"have{nearest(best, evaluate.metrics)}; it has {', '.join(evaluate.metrics)}"
            )
        if self.trainer.eval_where is None:
            raise ValueError(
                f"`{best}` is evaluated on `trainer.eval_where`, or by `evaluate.every_steps`; "
                "set one of them"
            )
        return self

    def evaluates(self, metric: str) -> bool:
        """Return whether the explorer evaluates this metric during the run."""
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
                "schedule.weight_transport is memory, and ray.trainer places the trainer in a "
                "process of its own; take store or broadcast"
            )
        if self.explorer.engine.sleeps:
            self._take_turns(self.explorer)
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
                f"{trainer.max_uses}; with an explorer exactly one source has neither `run`, `at` "
                "nor `source`, and `max_uses` is set for each source"
            )
        if self.is_replay and self.schedule.max_lag is None:
            raise ValueError(
                "schedule.max_lag is missing; a run that draws rows again needs their largest age, "
                "in optimizer steps"
            )
        return self

    def _take_turns(self, explorer: ExplorerConfig) -> None:
        """Raise ValueError for what lets both jobs work at once, while the engine should sleep."""
        both = {
            "schedule.streaming": self.schedule.streaming,
            "schedule.max_ahead": self.schedule.max_ahead > 0,
            "explorer.oversampling": explorer.oversampling is not None,
        }
        for key, is_set in both.items():
            if is_set:
                raise ValueError(
                    "explorer.engine.vllm.sleep is for an explorer and a trainer that take turns, "
                    f"and with {key} both work at once; set `sleep: false`, or leave {key} out"
                )

    def _offline(self) -> Self:
        if self.schedule.new_units_per_step is not None:
            raise ValueError("schedule.new_units_per_step is for runs with an explorer")
        if self.ray is not None:
            raise ValueError("ray is for runs with an explorer")
        return self

    def explorer_for(self, taskset: str) -> ExplorerConfig:
        """Return the section `explorer` as it applies to the tasks of a taskset."""
        explorer = self.explorer or ExplorerConfig()
        chosen = (self.tasks.mixture or {}).get(taskset)
        return explorer if chosen is None else _over(explorer, chosen)

    def evaluation_for(self, taskset: str) -> ExplorerConfig:
        """Return the section `explorer` as it applies when a taskset's tasks are evaluated."""
        settings = (self.evaluate or EvaluateConfig()).of(taskset)
        return _over(self.explorer_for(taskset), settings)

    @property
    def explorers(self) -> dict[str, ExplorerConfig]:
        """The section `explorer` as it applies to each taskset that is explored, by its key."""
        if self.tasks.mixture is None:
            return {"explorer": self.explorer or ExplorerConfig()}
        return {f"tasks.mixture.{name}": self.explorer_for(name) for name in self.tasks.mixture}

    @property
    def evaluations(self) -> dict[str, ExplorerConfig]:
        """The same for each taskset with its own settings that may be evaluated."""
        tasksets = (self.evaluate or EvaluateConfig()).tasksets
        named = self.tasks.mixture or {} if tasksets is None else tasksets
        found = {f"evaluate.tasksets.{name}": self.evaluation_for(name) for name in named}
        return found if tasksets else {"evaluate": self.evaluation_for("")} | found

    @property
    def is_replay(self) -> bool:
        """Whether the explorer's rows may be drawn in steps other than their own."""
        if self.explorer is None:
            return False
        if self.trainer.sampler.mixed is None:
            return not self.trainer.draws_once
        own = next(s for s in self.trainer.sampler.mixed.values() if not s.is_stored)
        return own.sampler.fifo is None or (own.max_uses or 1) > 1


def _over(explorer: ExplorerConfig, settings: Section) -> ExplorerConfig:
    """Return the explorer's section with those of its settings that another section has."""
    own = {k: v for k, v in settings if k in _OF_ROLLOUTS and v is not None}
    return explorer.model_copy(update=own)


_OF_ROLLOUTS = (
    *("workflow", "rewards", "sampling", "group_size", "rollout_timeout", "max_retries"),
    "system_prompt",
)
"""Settings of a rollout, which a taskset or an evaluation may have of its own."""


def load(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration: a YAML file or a packaged recipe's name, with `a.b=c` overrides.

    A configuration with `extends` (a recipe, or a file relative to its folder) is merged key by key
    over that one. Choices by name, such as the algorithm, are replaced as a whole; null removes a
    section.

    Raises ConfigError for a missing file, an unknown key (with the nearest known one), or a value
    of the wrong type.
    """
    tree = read(source)
    if "stages" in tree:
        raise ConfigError(
            f"`{source}` has stages; run all with `rlake run`, or one of "
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
    errors = error.errors()
    key = errors[0]["loc"][:1]
    # Of a union, the alternative that fits best fails deepest in the tree.
    first = max(
        (e for e in errors if e["loc"][:1] == key),
        key=lambda e: (len(e["loc"]), e["type"] == "extra_forbidden"),
    )
    where = ".".join(str(p) for p in first["loc"] if p != "str" and not str(p).startswith("dict["))
    if first["type"] == "extra_forbidden":
        section = _section(first["loc"][:-1])
        if (now := hint(where, section.model_fields)) is not None:
            return f"`{where}` is unknown; {now}"
        name = str(first["loc"][-1])
        within = [
            f"{key}.{name}"
            for key, field in section.model_fields.items()
            if any(name in inner.model_fields for inner in _sections(field.annotation))
        ]
        near = f"; did you mean `{within[0]}`?" if within else nearest(name, section.model_fields)
        return f"unknown key `{where}`{near}"
    if first["type"] == "missing":
        return f"key `{where}` is missing; add it to the configuration"
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    message = shorten(message.split(" or instance of ")[0], 2000)
    got = "" if first["type"] == "value_error" else f", got {shorten(repr(first['input']), 200)}"
    return f"`{where}`: {message}{got}" if where else message


def _section(path: Sequence[int | str]) -> type[Section]:
    section: type[Section] = RunConfig
    for name in path:
        if name in section.model_fields:  # else it is a name of the user's, as in `mixed`
            inner = _sections(section.model_fields[str(name)].annotation)
            section = next(inner, section)
    return section


def _sections(kind: Any) -> Iterator[type[Section]]:
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    for part in get_args(kind):
        yield from _sections(part)
