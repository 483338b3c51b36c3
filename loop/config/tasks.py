"""The sections `tasks` and `data`: which tasks are used, and how each batch is selected."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator

from .base import Choice, Float, Int, NamedRewards, NamedWorkflow, Section
from .engines import SamplingConfig


class SequentialConfig(Section):
    """In the order of their IDs, again from the first after the last."""


class ShuffleConfig(Section):
    """Each task once per epoch, in an order that is shuffled anew for each epoch."""


class RandomConfig(Section):
    """Uniformly at random, in every batch."""

    replacement: bool = False
    """Whether a task may be selected twice in one batch."""


class OrderedConfig(Section):
    """Sorted by a number, in the same order in each epoch; NULL comes last."""

    by: str
    """SQL expression, larger for harder tasks.

    It may name columns of `tasks`, values in `task_values`, and `pass_rate`, `num_scored` and
    `num_passed` of earlier runs.
    """


class ByPassRateConfig(Section):
    """In proportion to a weight, which is computed from each task's pass rate."""

    weight: str = "pass_rate * (1 - pass_rate)"
    """SQL expression, finite and not negative; NULL is 0.

    `pass_rate` includes `prior_count` rollouts at `prior_mean`, and `num_rollouts` is the number of
    rollouts. It may also name columns of `tasks` and values in `task_values`.
    """
    prior_mean: Float | None = Field(default=None, ge=0, le=1)
    """The pass rate of a task without rollouts; None: the mean of all rollouts, or 0.5."""
    prior_count: Float = Field(default=1.0, gt=0)
    """How many rollouts the prior counts for."""
    half_life: Float | None = Field(default=None, gt=0)
    """Batches after which a rollout counts half, because the policy changes.

    None: the number of batches in one pass over all tasks.
    """
    history: str | None = None
    """SQL condition over `experiences`: rollouts of earlier runs that count too."""


class BotsConfig(Section):
    """Bayesian online task selection (arXiv:2510.26374): tasks near a target pass rate."""

    target: Float = Field(default=0.5, ge=0, le=1)
    """The pass rate that selected tasks should have."""
    temperature: Float = Field(default=0.0, ge=0)
    """Temperature of the softmax over -|target - pass rate|; 0 selects the nearest tasks."""
    thompson_sampling: bool = True
    """Whether pass rates are sampled from their posterior; if not, its mean is used."""
    decay: Float = Field(default=0.1, ge=0, le=1)
    """Share of the counts that each batch discards (lambda in the paper).

    Tasks without `weak` and `strong` lose at most half of theirs in one pass over all tasks.
    """
    rho: Float = Field(default=0.1, ge=0, le=1)
    """Weight of the inferred pass rates of tasks without rollouts."""
    adaptive_rho: bool = False
    """Whether rho is halved whenever inferred pass rates are off by 0.25 or more on average."""
    weak: str | None = None
    """SQL expression: each task's pass rate with a weak model; NULL if unknown."""
    strong: str | None = None
    """The same with a strong model. Without both, nothing is inferred for the task."""
    history: str | None = None
    """SQL condition over `experiences`: rollouts of earlier runs that count too."""

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.weak is None) != (self.strong is None):
            one, other = ("weak", "strong") if self.strong is None else ("strong", "weak")
            raise ValueError(f"`{one}` needs `{other}` too: pass rates lie between the two")
        return self


class SelectorConfig(Choice):
    """How tasks are selected: exactly one key is set, with its parameters."""

    noun: ClassVar[str] = "selector"

    sequential: SequentialConfig | None = None
    shuffle: ShuffleConfig | None = None
    random: RandomConfig | None = None
    easy_to_hard: OrderedConfig | None = None
    hard_to_easy: OrderedConfig | None = None
    by_pass_rate: ByPassRateConfig | None = None
    bots: BotsConfig | None = None


class TasksetConfig(Section):
    """A taskset's share of each batch, and what differs for its tasks."""

    weight: Float = Field(default=1.0, gt=0)
    """Its weight relative to the others."""
    selector: SelectorConfig | None = None
    """How its tasks are selected; None: by `tasks.selector`."""
    workflow: NamedWorkflow | None = None
    """Workflow of its tasks; None: `explorer.workflow`."""
    rewards: NamedRewards | None = None
    """Rewards of its tasks, and no others; None: `explorer.rewards`."""
    sampling: SamplingConfig | None = None
    """Sampling parameters of its rollouts; None: `explorer.sampling`."""
    system_prompt: str | None = None
    """System message of its tasks that have none; None: `explorer.system_prompt`."""
    group_size: Int | None = Field(default=None, ge=1)
    """Rollouts of each of its tasks; None: `explorer.group_size`."""
    rollout_timeout: Float | None = Field(default=None, gt=0)
    """Timeout of one of its rollouts, in seconds; None: `explorer.rollout_timeout`."""
    max_retries: Int | None = Field(default=None, ge=0)
    """Retries of one of its rollouts; None: `explorer.max_retries`."""
    pass_metric: str | None = None
    """What determines whether its rollouts passed; None: `tasks.pass_metric`."""
    pass_threshold: Float | None = None
    """From which value on they passed; None: `tasks.pass_threshold`."""

    @model_validator(mode="before")
    @classmethod
    def _weight_alone(cls, value: Any) -> Any:
        return value if isinstance(value, Mapping | cls) else {"weight": value}


_ONE_OR_SEVERAL = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]
}


class SourceConfig(Section):
    """Files, dataset hubs or databases whose rows are stored before the run begins.

    As `rlake import` does: rows that are stored already are skipped.
    """

    path: Annotated[tuple[str, ...], WithJsonSchema(_ONE_OR_SEVERAL)] = Field(min_length=1)
    """A file or a pattern of files, a dataset's folder, or an address; or several of these.

    Addresses are those of `rlake import --help`, such as `hf://OWNER/NAME` and
    `postgresql://${env:DATABASE_USER}@HOST/DATABASE#TABLE`.
    """
    format: str | None = None
    """A format of `rlake import --help`; None: detected."""
    sql: str | None = None
    """A SELECT over the table `input` that returns columns of the store."""
    dataset_split: str | None = None
    """The split of a dataset to read; None: its only one."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        given = {"path": value} if isinstance(value, str | list | tuple) else value
        if isinstance(given, Mapping) and isinstance(given.get("path"), str):
            return {**given, "path": [given["path"]]}
        return given


class TaskSourceConfig(SourceConfig):
    """Where tasks are read from."""

    taskset: str | None = None
    """Their taskset; None: by the name of the file."""
    split: str = "train"
    """Their split in the store."""


class FileConfig(SourceConfig):
    """Files whose rows are stored before the run begins."""

    table: Literal["experiences", "preferences"] = "experiences"
    """The table of its rows."""


class TasksConfig(Section):
    """Which tasks are used."""

    generator: str | dict[str, dict[str, Any]] | None = None
    """Functions that return tasks, as `name` or `{name: {parameter: value}}`.

    Tasks are stored once.
    """
    path: TaskSourceConfig | None = None
    """A source of tasks, several, or `{path: ..., sql: ..., taskset: ..., split: ...}`.

    They are imported before the run starts, and a task that is stored already is left alone.
    """
    where: str = "split = 'train'"
    """SQL condition over the table `tasks`."""
    selector: SelectorConfig = SelectorConfig(shuffle=ShuffleConfig())
    """How the tasks of each batch are selected."""
    mixture: dict[str, TasksetConfig] | None = None
    """Tasksets, with their weights and what differs for each; each batch has tasks of all of them.

    `{sums: 2.0, games: {weight: 1.0, rewards: countdown, group_size: 16}}`
    """
    pass_metric: str | None = None
    """Entry of a rollout's `metrics` or `rewards` that determines whether it passed.

    None: `accuracy`, or the reward without such an entry. Parts of a reward are stored with their
    weights applied.
    """
    pass_threshold: Float = 1.0
    """A rollout passes if the metric is at least this large."""
    save_estimates_every: Int = Field(default=20, ge=1)
    """Batches between two records of the estimates of all tasks.

    Those of selected tasks are always recorded.
    """

    def passes(self, taskset: str) -> tuple[str | None, float]:
        """Return the metric by which a taskset's rollouts pass, and the least value of it."""
        own = (self.mixture or {}).get(taskset)
        metric = own and own.pass_metric
        threshold = own and own.pass_threshold
        return metric or self.pass_metric, self.pass_threshold if threshold is None else threshold


class DataConfig(Section):
    """Rows that a run trains on in addition to those of its explorer, or instead of them."""

    generator: str | dict[str, dict[str, Any]] | None = None
    """A function that returns rows of tables, as `name` or `{name: {parameter: value}}`.

    It takes the tasks of `tasks.where` and returns `{table: rows}`. Rows whose ID is already stored
    are skipped.
    """
    file: FileConfig | None = None
    """A path, several, or `{path: ..., table: ..., format: ..., sql: ...}`; each is imported once.

    A run trains on all stored rows that match `trainer.where`, including those of the file.
    """

    @property
    def makes_rows(self) -> bool:
        """Whether rows are stored before the run begins."""
        return self.generator is not None or self.file is not None
