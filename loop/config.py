"""The configuration of a run: one typed tree, from YAML or Python, with unknown keys refused."""

import string
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ..store.errors import ConfigError, nearest

_RECIPES = files(__package__ or "").joinpath("recipes")


def _no_bool(value: Any) -> Any:
    """Refuse true where a number is wanted; text that is a number stays, as YAML reads `1e-3`."""
    if isinstance(value, bool):
        raise ValueError(f"input should be a number, got {value}")
    return value


Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
Share = Annotated[Float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the tree; unknown keys are errors, and values do not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class TinyModel(Section):
    """A small Qwen3 model made from scratch, with a tokenizer of single characters."""

    hidden_size: Int = Field(default=128, ge=8)
    layers: Int = Field(default=2, ge=1)
    heads: Int = Field(default=4, ge=1)
    intermediate_size: Int | None = None
    """None: four times hidden_size."""
    init_std: Float = Field(default=0.02, gt=0)
    """Standard deviation of the weights at the start."""
    max_length: Int = Field(default=1024, ge=8)
    """Most tokens of a sequence."""
    alphabet: str = string.printable
    """Each of these characters is a token."""


class ModelConfig(Section):
    """The model that a run starts from."""

    path: str | None = None
    """Folder or hub name in the Hugging Face format."""
    tiny: TinyModel | None = None
    """Instead of a path: a model made from scratch."""
    dtype: str = "float32"
    """Only float32 so far; bfloat16 and float16 are planned."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$")
    """auto takes a GPU when there is one; cuda:1 is the second."""

    @field_validator("dtype")
    @classmethod
    def _trainable(cls, dtype: str) -> str:
        if dtype != "float32":
            raise ValueError(
                f"must be float32 for now, got {dtype!r}: bfloat16 would lose small updates without"
                " float32 master weights, and float16 needs loss scaling; both are planned"
            )
        return dtype

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.path is None and self.tiny is None:
            raise ValueError("has neither `path` nor `tiny`; name a model folder, or set `tiny`")
        if self.path is not None and self.tiny is not None:
            raise ValueError("has both `path` and `tiny`; set one of them to null")
        return self


class TasksConfig(Section):
    """Which tasks are tried."""

    make: str | dict[str, dict[str, Any]] | None = None
    """A function that gives tasks, as `name` or `{name: {parameter: value}}`; stored once."""
    where: str = "split = 'train'"
    """SQL condition over the table `tasks`."""


class SamplingConfig(Section):
    """How tokens are sampled."""

    temperature: Float = Field(default=1.0, ge=0)
    max_tokens: Int = Field(default=64, ge=1)


class ExplorerConfig(Section):
    """The producer of experience."""

    workflow: str = "single_turn"
    """Name of a workflow of ours, or `package.module:function`."""
    rewards: str | dict[str, Float] = "exact_match"
    """A reward function, or several with their weights."""
    group_size: Int | None = Field(default=None, ge=1)
    """Tries at each task; None takes the algorithm's."""
    tasks_per_batch: Int | None = Field(default=None, ge=1)
    """None: as many as one training step needs."""
    tasks_per_commit: Int | None = Field(default=None, ge=1)
    """Tasks that are sampled and stored together; None: the whole batch."""
    sampling: SamplingConfig = SamplingConfig()
    try_seconds: Float = Field(default=600.0, gt=0)
    """Longest time of one try; then it becomes a row that says so."""
    max_failed_batches: Int = Field(default=3, ge=1)
    """So many batches in a row without one usable row end the job."""


class ScheduleConfig(Section):
    """How far explorer and trainer may be apart, in optimizer steps."""

    max_ahead: Int = Field(default=0, ge=0)
    """Train batches that the explorer may be ahead; 0 is on-policy."""
    max_lag: Int | None = Field(default=None, ge=0)
    """Oldest rows that the trainer takes; None: as old as max_ahead and publish_every make them."""
    publish_every: Int = Field(default=1, ge=1)
    """Optimizer steps between two publications of weights."""
    wait_seconds: Float = Field(default=600, gt=0)
    """Longest wait of one job for the other."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        oldest = self.max_ahead + self.publish_every - 1
        if self.publish_every > self.max_ahead + 1:
            raise ValueError(
                f"publish_every {self.publish_every} is more than max_ahead + 1: the explorer "
                "would wait for weights that are never published"
            )
        if self.max_lag is not None and self.max_lag < oldest:
            raise ValueError(
                f"max_lag {self.max_lag} is less than max_ahead + publish_every - 1 = {oldest}: "
                "rows would be stale before they could be drawn"
            )
        return self

    @property
    def lag(self) -> int:
        """The oldest rows that the trainer takes."""
        return self.max_ahead + self.publish_every - 1 if self.max_lag is None else self.max_lag


class TrainerConfig(Section):
    """The consumer of experience."""

    steps: Int | None = Field(default=None, ge=1)
    """Optimizer steps; None (offline only): until each row was drawn `epochs` times."""
    batch_size: Int = Field(default=32, ge=1)
    """Groups a step for algorithms that work on groups, else rows."""
    where: str | None = None
    """SQL condition over `experiences`; offline it chooses the rows from the whole store."""
    sampler: str = "fifo"
    epochs: Int = Field(default=1, ge=1)
    """How often a row may be drawn."""
    learning_rate: Float = Field(default=1e-5, gt=0)
    warmup_steps: Int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    decay: str = Field(default="constant", pattern="^(constant|linear|cosine)$")
    """What the learning rate does after that, until the last step."""
    decay_to: Float = Field(default=0.0, ge=0, le=1)
    """Share of the learning rate that is left at the end of a decay."""
    weight_decay: Float = Field(default=0.0, ge=0)
    betas: tuple[Share, Share] = (0.9, 0.999)
    max_grad_norm: Float = Field(default=1.0, gt=0)
    micro_batch_tokens: Int = Field(default=16384, ge=1)
    """Most tokens, padding included, that go through the model at once."""
    checkpoint_every: Int = Field(default=50, ge=1)
    keep_checkpoints: Int = Field(default=2, ge=1)
    evaluate_loss_where: str | None = None
    """Rows whose loss is measured at the start, at each checkpoint and at the end.

    They are never trained on.
    """

    @property
    def trained_where(self) -> str | None:
        """SQL condition on what may be trained on: `where`, without what is only measured."""
        if self.evaluate_loss_where is None:
            return self.where
        others = f"NOT coalesce(({self.evaluate_loss_where}\n), false)"
        return others if self.where is None else f"({self.where}\n) AND {others}"


class EvaluateConfig(Section):
    """How a policy is measured."""

    where: str = "split = 'eval'"
    """SQL condition over the table `tasks`."""
    group_size: Int = Field(default=1, ge=1)
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    batch_tasks: Int = Field(default=256, ge=1)
    """Tasks sampled together."""


class RunConfig(Section):
    """All of a run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the run: its rows, its folder. A run is continued with `--resume`."""
    seed: Int = Field(default=0, ge=0)
    store: str | None = None
    """Folder or address of the store; `--store` and RLAKE_STORE say it too."""
    output: str | None = None
    """Folder for checkpoints and weights; None: `runs/` in the store's folder."""
    threads: Int | None = Field(default=None, ge=1)
    """CPU threads of torch in each job; None: what torch chooses."""
    model: ModelConfig
    algorithm: str | dict[str, dict[str, Any]]
    """Name of an algorithm, or `{name: {parameter: value}}`."""
    tasks: TasksConfig = TasksConfig()
    explorer: ExplorerConfig | None = None
    """Left out: the run is offline, and trains on what is stored."""
    schedule: ScheduleConfig = ScheduleConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluate: EvaluateConfig | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.explorer is not None and self.trainer.steps is None:
            raise ValueError("trainer.steps is missing; a run with an explorer needs it")
        if self.explorer is not None and (self.trainer.sampler, self.trainer.epochs) != ("fifo", 1):
            # the explorer foresees which rows each step draws, and so which weights are due
            raise ValueError(
                f"trainer.sampler {self.trainer.sampler} with epochs {self.trainer.epochs} is for "
                "runs on what is stored; a run with an explorer draws each row once, with fifo: "
                "leave both keys out, or take the `explorer` section away"
            )
        return self


def load(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration: a YAML file or a packaged recipe's name, with `a.b=c` overrides.

    Raises ConfigError for a file that is not there, an unknown key (with the nearest known one), or
    a value of the wrong type.
    """
    tree = _yaml(_text(source), str(source))
    if not isinstance(tree, dict):
        raise ConfigError(f"`{source}` must hold keys and values, got {type(tree).__name__}")
    for override in overrides:
        _override(tree, override)
    return build(tree)


def build(tree: Mapping[str, Any]) -> RunConfig:
    """Check a tree of plain values and return the configuration."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def recipes() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(
        p.name.removesuffix(".yaml") for p in _RECIPES.iterdir() if p.name.endswith(".yaml")
    )


def _text(source: str | Path) -> str:
    path = Path(source)
    if path.suffix in {".yaml", ".yml"} or path.exists():
        if not path.is_file():
            raise ConfigError(f"there is no configuration file `{source}`")
        return path.read_text()
    if str(source) not in recipes():
        raise ConfigError(f"there is no recipe `{source}`{nearest(str(source), recipes())}")
    return _RECIPES.joinpath(f"{source}.yaml").read_text()


def _override(tree: dict[str, Any], text: str) -> None:
    path, sign, value = text.partition("=")
    if not sign:
        raise ConfigError(f"`--set {text}` must look like `trainer.steps=100`")
    *parents, last = path.strip().split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            child = node[parent] = {}
        node = child
    node[last] = _yaml(value, f"--set {text}")


def _yaml(text: str, source: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"`{source}` is no YAML: {' '.join(str(error).split())}") from error


def _explain(error: ValidationError) -> str:
    """Say the first thing that is wrong, in our words."""
    errors = error.errors()
    key = errors[0]["loc"][:1]
    # of a value that may have several types, the type that fits best fails deepest in the tree
    first = max((e for e in errors if e["loc"][:1] == key), key=lambda e: len(e["loc"]))
    where = ".".join(str(p) for p in first["loc"] if p != "str" and not str(p).startswith("dict["))
    if first["type"] == "extra_forbidden":
        section = _section(first["loc"][:-1])
        return f"unknown key `{where}`{nearest(str(first['loc'][-1]), section.model_fields)}"
    if first["type"] == "missing":
        return f"key `{where}` is missing; add it to the configuration"
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    got = "" if first["type"] == "value_error" else f", got {first['input']!r}"
    return f"`{where}`: {message}{got}" if where else message


def _section(path: Sequence[int | str]) -> type[Section]:
    """Return the class that describes the part of the tree at `path`."""
    section: type[Section] = RunConfig
    for name in path:
        kind = section.model_fields[str(name)].annotation
        options = [kind, *get_args(kind)]
        section = next(o for o in options if isinstance(o, type) and issubclass(o, Section))
    return section
