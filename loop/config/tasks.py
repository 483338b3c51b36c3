"""Which tasks are tried, and how those of each batch are chosen."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .base import Choice, Float, Int, Section


class SequentialConfig(Section):
    """In the order of their ids, from the first again after the last."""


class ShuffleConfig(Section):
    """Each once in an epoch, in an order that is shuffled anew for each."""


class RandomConfig(Section):
    """Each as likely as any other, in every batch."""

    replacement: bool = False
    """Whether a task may come twice in one batch."""


class OrderedConfig(Section):
    """By a number, in the same order in each epoch; tasks for which it is NULL come last."""

    by: str
    """SQL expression, larger for harder tasks.

    It may name columns of `tasks`, values in `task_values`, and `pass_rate`, `num_scored` and
    `num_passed`: what runs before this one came to.
    """


class ByPassRateConfig(Section):
    """Likelier the larger a weight, which is worked out of how often each task was solved."""

    weight: str = "pass_rate * (1 - pass_rate)"
    """SQL expression, finite and not negative; NULL is 0.

    `pass_rate` counts `prior_tries` tries at `prior` beside those made, `num_tries` the tries. It
    may name columns of `tasks` and values in `task_values` too.
    """
    prior_mean: Float | None = Field(default=None, ge=0, le=1)
    """The pass rate of a task that was not tried; None: the mean of all tries, 0.5 without any."""
    prior_count: Float = Field(default=1.0, gt=0)
    """How many tries that counts for."""
    half_life: Float | None = Field(default=None, gt=0)
    """Batches after which a try counts half, since the policy changes.

    None: as many as it would take to try all tasks once.
    """
    history: str | None = None
    """SQL condition over `experiences`: tries of runs before this one that count too."""


class BotsConfig(Section):
    """Bayesian online task selection (arXiv:2510.26374): near a pass rate that is wanted."""

    target: Float = Field(default=0.5, ge=0, le=1)
    """The pass rate of the tasks that are wanted."""
    temperature: Float = Field(default=0.0, ge=0)
    """Of the softmax over -|target - pass rate|; 0 takes those nearest to the target."""
    thompson_sampling: bool = True
    """Whether pass rates are sampled from what is believed, else its mean is taken."""
    decay: Float = Field(default=0.1, ge=0, le=1)
    """Share of what was counted that each batch forgets (the paper's lambda).

    Tasks without `weak` and `strong` forget at most half while all could be tried once.
    """
    rho: Float = Field(default=0.1, ge=0, le=1)
    """Weight of the pass rates that are inferred for tasks that were not tried."""
    adaptive_rho: bool = False
    """Whether rho is halved whenever they are wrong by 0.25 or more in the mean."""
    weak: str | None = None
    """SQL expression: each task's pass rate with a weak model; NULL where it is not known."""
    strong: str | None = None
    """The same with a strong one. Without both, nothing is inferred for the task."""
    history: str | None = None
    """SQL condition over `experiences`: tries of runs before this one that count too."""

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.weak is None) != (self.strong is None):
            one, other = ("weak", "strong") if self.strong is None else ("strong", "weak")
            raise ValueError(f"`{one}` needs `{other}` beside it: pass rates lie between the two")
        return self


class SelectorConfig(Choice):
    """One way of choosing tasks: the one key that is given, with its parameters."""

    noun: ClassVar[str] = "selector"

    sequential: SequentialConfig | None = None
    shuffle: ShuffleConfig | None = None
    random: RandomConfig | None = None
    easy_to_hard: OrderedConfig | None = None
    hard_to_easy: OrderedConfig | None = None
    by_pass_rate: ByPassRateConfig | None = None
    bots: BotsConfig | None = None


class TasksetConfig(Section):
    """A taskset's part of each batch."""

    weight: Float = Field(gt=0)
    """Its weight beside those of the others."""
    selector: SelectorConfig | None = None
    """How its tasks are chosen; None: as `tasks.selector` says."""

    @model_validator(mode="before")
    @classmethod
    def _weight_alone(cls, value: Any) -> Any:
        return value if isinstance(value, Mapping | cls) else {"weight": value}


class TasksConfig(Section):
    """Which tasks are tried."""

    generator: str | dict[str, dict[str, Any]] | None = None
    """A function that gives tasks, as `name` or `{name: {parameter: value}}`; stored once."""
    where: str = "split = 'train'"
    """SQL condition over the table `tasks`."""
    selector: SelectorConfig = SelectorConfig(shuffle=ShuffleConfig())
    """How the tasks of each batch are chosen."""
    mixture: dict[str, TasksetConfig] | None = None
    """Tasksets with their weights: each batch has tasks of all of them."""
    pass_metric: str | None = None
    """Entry of a try's `metrics` or `rewards` that says whether it was right.

    None: the one called `accuracy`, and the reward where there is none. Parts of a reward are
    stored with their weight.
    """
    pass_threshold: Float = 1.0
    """A try passed when that is so much or more."""
    save_estimates_every: Int = Field(default=20, ge=1)
    """Batches between two records of what is believed of all tasks; of those tried it is always."""


class FileConfig(Section):
    """A file whose rows are stored before the run begins, as `rlake import` does."""

    path: str
    table: Literal["experiences", "preferences"] = "experiences"
    """What its rows are."""
    format: str | None = None
    """One of `rlake import --help`, when the file does not tell."""
    sql: str | None = None
    """One SELECT over the table `input` that names our columns."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class DataConfig(Section):
    """Rows that a run trains on beside those of its explorer, or in place of them."""

    generator: str | dict[str, dict[str, Any]] | None = None
    """A function that gives rows for tables, as `name` or `{name: {parameter: value}}`.

    It is given the tasks of `tasks.where`, and returns `{table: rows}`. Rows are stored once: what
    is there already, by its id, is left alone.
    """
    file: FileConfig | None = None
    """A path, or `{path: ..., table: ..., format: ..., sql: ...}`; stored once, whole.

    A run trains on all rows that `trainer.where` admits, those of the file among them.
    """

    @property
    def makes_rows(self) -> bool:
        """Whether rows are stored before the run begins."""
        return self.generator is not None or self.file is not None
