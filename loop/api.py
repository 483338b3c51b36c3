"""The run functions of Python: whatever a configuration file can say, a call can.

They are `rlake.run`, `train`, `evaluate` and `serve`. All show their progress on stderr, and a run
that Ctrl-C stops goes on with the same call and `resume=True`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from ..store import Store, interrupts
from ..store.errors import ConfigError, NotFoundError, missing_extra, nearest
from ..store.query import literal
from .config import (
    ExplorerConfig,
    ModelConfig,
    RunConfig,
    ServeConfig,
    TasksConfig,
    build,
    load,
    load_stages,
)
from .config.callables import named
from .config.load import merged
from .runs.progress import Display

try:
    from .evaluation.evaluate import evaluate as evaluate_policy
    from .evaluation.policies import PolicyPool, subject
    from .evaluation.result import Evaluation
    from .inference.policy import Policy
    from .rollouts.setup import sampling
    from .run import run as run_jobs
    from .stages import run_stages
except ModuleNotFoundError as error:
    raise missing_extra(error.name or "torch", "train") from error

_log = logging.getLogger(__name__)

Config = RunConfig | str | Path
"""A configuration, a YAML file, or the name of a packaged recipe."""
Rewards = str | Callable[..., Any] | Mapping[Any, Any]
"""A reward function or its name; or several, with their weights or parameters."""


@dataclass(frozen=True)
class Run:
    """A run of a store: what it measured, what it tried, and what it learned.

    >>> Run(store, "demo").experiences().collect().height
    0
    """

    store: Store
    run_id: str

    @property
    def config(self) -> RunConfig:
        """The configuration of its newest attempt; NotFoundError when it never started."""
        found = self.store.sql(
            f"SELECT config FROM runs WHERE run_id = {literal(self.run_id)} AND job <> 'evaluate' "
            "ORDER BY started_at DESC, attempt DESC LIMIT 1"
        ).fetchall()
        if not found:
            known = [
                run for (run,) in self.store.sql("SELECT DISTINCT run_id FROM runs").fetchall()
            ]
            raise NotFoundError(f"no run is called `{self.run_id}`{nearest(self.run_id, known)}")
        return RunConfig.model_validate_json(found[0][0])

    def metrics(self, *names: str) -> pl.DataFrame:
        """Return metrics over steps, a column each; all of them when none is named.

        Those of the explorer (`explore/...`) are by its batches. Raises NotFoundError for a name
        that the run has not.
        """
        found = self.store.sql(
            "SELECT step, name, value FROM metrics_current "
            f"WHERE run_id = {literal(self.run_id)} ORDER BY step, name"
        ).pl()
        known = found["name"].unique().sort().to_list()
        unknown = [name for name in names if name not in known]
        if unknown:
            raise NotFoundError(
                f"run `{self.run_id}` has no metric `{unknown[0]}`{nearest(unknown[0], known)}"
            )
        chosen = found.filter(pl.col("name").is_in(names or known))
        wide = chosen.pivot("name", index="step", values="value", aggregate_function="last")
        return wide.select("step", *(names or known)).sort("step")

    def experiences(self) -> pl.LazyFrame:
        """Return the rows that the run made, as a lazy frame."""
        return self.store.scan("experiences").filter(pl.col("run_id") == self.run_id)

    def policy(self, version: int | None = None) -> Policy:
        """Return what answers with the weights of a version, the newest when none is given.

        It samples as the run did: `await policy.generate(messages, n=4)`.
        """
        config = self.config
        settings = (config.explorer or ExplorerConfig()).sampling
        pool = PolicyPool(self.store, config, sampling=sampling(settings))
        return pool.policy(subject(self.store, config, version, None))

    def resume(self, **changes: Any) -> "Run":
        """Go on where the run stopped, or up to more steps: `run.resume(trainer={"steps": 200})`.

        Changes are sections, merged key by key. An `output` that was given once is given again.
        """
        tree = self.config.model_dump(mode="json", exclude_unset=True)
        return run(self.store, build(merged(tree, changes)), resume=True)


def run(store: Store, config: Config, *, resume: bool = False) -> Run:
    """Run all jobs of a configuration to the last training step, or all of its stages.

    >>> small = RunConfig.from_yaml("grpo_digits", ["trainer.steps=1", "trainer.batch_size=2"])
    >>> run(store, small).metrics("train/loss").height
    1

    With `resume`, go on where a run stopped. Raises what made it fail.
    """
    if not isinstance(config, RunConfig) and (stages := load_stages(config)):
        last = [stage.config for stage in stages if stage.kind == "train"][-1]
        with _shown(last, None) as display:
            run_stages(store, stages, resume=resume, listener=display)
        return Run(store, last.name)
    settings = _settings(config)
    with _shown(settings, settings.trainer.steps) as display:
        run_jobs(store, settings, resume=resume, listener=display)
    return Run(store, settings.name)


def train(
    store: Store,
    *,
    model: str | Path | Mapping[str, Any] | ModelConfig,
    algorithm: Any = "grpo",
    rewards: Rewards | Sequence[Any] | None = None,
    tasks: str | Callable[..., Any] | Mapping[str, Any] | TasksConfig | None = None,
    where: str | None = None,
    steps: int | None = None,
    name: str | None = None,
    resume: bool = False,
    **sections: Any,
) -> Run:
    """Train a model on the tasks of a store, or on rows that are in it, and return the run.

    With `rewards` (or a section `explorer`) the model tries the tasks, and learns from what it
    tried; without, it learns from the stored rows for which `where` holds.

    >>> def ones(task, experience):
    ...     return experience.response_text.count("1")
    >>> model = RunConfig.from_yaml("grpo_digits").model
    >>> run = train(store, model=model, rewards=ones, steps=2, trainer={"batch_size": 1})
    >>> run.run_id, run.metrics("train/reward_mean").columns, run.experiences().collect().height
    ('run-1', ['step', 'train/reward_mean'], 16)

    `model` is a folder, a Hugging Face name, or the section of that name. `algorithm` is a name,
    `{name: {parameter: value}}`, or an algorithm's class. `tasks` is an SQL condition over the
    table `tasks`, a function that gives tasks, or the section. `sections` are the others of a
    configuration, as `trainer={"batch_size": 16}` or `explorer={"sampling": {"max_tokens": 256}}`.
    Without a `name`, it is the next free `run-N`; with `resume`, the newest run.
    """
    tree: dict[str, Any] = {
        "name": name or (_newest_run(store) if resume else _free_name(store)),
        "model": {"path": str(model)} if isinstance(model, str | Path) else model,
        "algorithm": algorithm,
    }
    changes: dict[str, Any] = {
        "explorer": None if rewards is None else {"rewards": _weighted(rewards)},
        "tasks": _tasks(tasks),
        "trainer": {k: v for k, v in {"where": where, "steps": steps}.items() if v is not None},
    }
    given = {key: value for key, value in changes.items() if value}
    return run(store, build(merged(named(tree | sections), named(given))), resume=resume)


def evaluate(store: Store, config: Config, *, version: int | None = None) -> Evaluation:
    """Measure the newest policy of a run, or another version, on the tasks of `evaluate.where`.

    >>> config = RunConfig.from_yaml("grpo_digits", ["evaluate.sampling.max_tokens=2"])
    >>> evaluate(store, config).num_tasks
    20
    """
    settings = _settings(config)
    with _shown(settings, None) as display:
        return evaluate_policy(store, settings, version=version, listener=display)


def serve(store: Store, config: Config) -> None:
    """Answer OpenAI's chat API with a run's policy until a signal ends it; see `rlake serve`.

    >>> serve(store, RunConfig.from_yaml("grpo_digits", ["serve.host=0.0.0.0"]))
    Traceback (most recent call last):
        ...
    rlake.store.errors.ConfigError: serving at `0.0.0.0` needs a token: ...
    """
    try:
        from .serving import access
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or "fastapi", "serve") from error
    settings = _settings(config)

    def ready(url: str, recovered: int) -> None:
        more = f", after {recovered} sessions that an earlier server left" if recovered else ""
        _log.warning("serving %s at %s%s; Ctrl-C ends it", settings.name, url, more)

    access.serve(store, settings, settings.serve or ServeConfig(), ready=ready)


def _settings(config: Config) -> RunConfig:
    return config if isinstance(config, RunConfig) else load(config)


@contextmanager
def _shown(config: RunConfig, total_steps: int | None) -> Iterator[Display]:
    """Show progress; an interrupt says how to go on, also one that a library heard of first."""
    try:
        with Display(config, total_steps=total_steps) as display:
            yield display
    except BaseException as error:
        if not interrupts.caused(error):
            raise
        message = (
            f"run `{config.name}` was stopped; go on with the same call and `resume=True`, or with "
            f"`rlake.Run(store, {config.name!r}).resume()`"
        )
        raise KeyboardInterrupt(message) from error


def _weighted(rewards: Any) -> Any:
    several = isinstance(rewards, Sequence) and not isinstance(rewards, str)
    if several:
        return dict.fromkeys(rewards, 1.0)
    return rewards if isinstance(rewards, str | Mapping) else {rewards: 1.0}


def _tasks(tasks: Any) -> Any:
    if callable(tasks):
        return {"generator": tasks}
    return {"where": tasks} if isinstance(tasks, str) else tasks


def _names(store: Store) -> set[str]:
    return {name for (name,) in store.sql("SELECT DISTINCT run_id FROM runs").fetchall()}


def _free_name(store: Store) -> str:
    taken = _names(store)
    return next(name for i in range(1, len(taken) + 2) if (name := f"run-{i}") not in taken)


def _newest_run(store: Store) -> str:
    found = store.sql(
        "SELECT run_id FROM runs WHERE job = 'train' ORDER BY started_at DESC LIMIT 1"
    ).fetchall()
    if not found:
        raise ConfigError("there is no run to resume; leave `resume` out, or give its `name`")
    return found[0][0]
