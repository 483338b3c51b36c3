"""The run functions of the Python API: `rlake.run`, `train`, `evaluate` and `serve`.

They accept everything that a configuration file does, and show their progress on stderr. A run that
Ctrl-C stops continues with the same call and `resume=True`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from ..store import Store, connect, interrupts
from ..store.errors import ConfigError, NotFoundError, closest, missing_extra, nearest
from ..store.lineage.policy import PolicyLineage, of_policy
from ..store.query import literal
from ..store.verify_draws import Verdict, verify
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
from .runs.job import newest_config, run_names
from .runs.progress import Display

try:
    from .evaluation.evaluate import evaluate as evaluate_policy
    from .evaluation.policies import PolicyPool, subject
    from .evaluation.result import Evaluation
    from .inference.policy import Policy
    from .rollouts.setup import sampling
    from .run import run as run_jobs
    from .stages import run_stages
    from .trainer.redraw import Rebuilt, rebuild
except ModuleNotFoundError as error:
    raise missing_extra(error.name or "torch", "train") from error

_log = logging.getLogger(__name__)

Config = RunConfig | str | Path
"""A configuration, a YAML file, or the name of a packaged recipe."""
Address = Store | str | Path
"""A store, or the folder or `s3://` address of one."""
Rewards = str | Callable[..., Any] | Mapping[Any, Any]
"""A reward function or its name; or several, with their weights or parameters."""


@dataclass(frozen=True)
class Run:
    """A run of a store: its metrics, its experiences and its policies.

    >>> Run(store, "demo").experiences().collect().height
    0
    """

    store: Store
    run_id: str

    @property
    def config(self) -> RunConfig:
        """The configuration of its newest attempt; NotFoundError if it never started."""
        found = newest_config(self.store, self.run_id)
        if found is None:
            known = run_names(self.store)
            raise NotFoundError(f"run `{self.run_id}` does not exist{nearest(self.run_id, known)}")
        return RunConfig.model_validate_json(found)

    def metrics(self, *names: str) -> pl.DataFrame:
        """Return metrics over steps, one column each; all of them if none is named.

        The steps of explorer metrics (`explore/...`) are its batches. Raises NotFoundError for a
        metric that the run does not have.
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
        """Return the experiences of the run's explorer as a lazy frame."""
        return self.store.scan("experiences").filter(pl.col("run_id") == self.run_id)

    def policy(self, version: int | None = None) -> Policy:
        """Return the policy with the weights of a version; None: the newest.

        It samples with the run's settings: `await policy.generate(messages, n=4)`.
        """
        config = self.config
        settings = (config.explorer or ExplorerConfig()).sampling
        pool = PolicyPool(self.store, config, sampling=sampling(settings))
        return pool.policy(subject(self.store, config, version, None))

    def lineage(self, version: int) -> PolicyLineage:
        """Return what made the weights of a version: rows, functions, pipelines, snapshots.

        Raises NotFoundError for a version without published weights.
        """
        return of_policy(self.store, self.run_id, version)

    def verify(self, step: int) -> tuple[Verdict, Rebuilt]:
        """Prove what a step was trained on: its rows are unchanged, and are drawn again.

        The first value compares the rows' digests with those in `draws`; the second draws the batch
        again from the seed, the step and what was stored then. Raises NotFoundError for a step that
        is not recorded.
        """
        verdict = verify(self.store, self.run_id, step)
        return verdict, rebuild(self.store, self.run_id, step)

    def resume(self, **changes: Any) -> "Run":
        """Continue where the run stopped, or to more steps: `run.resume(trainer={"steps": 200})`.

        Changes are sections, merged key by key. An `output` must be given again.
        """
        tree = self.config.plain(exclude_unset=True)
        return run(self.store, build(merged(tree, changes)), resume=True)


def run(store: Address, config: Config, *, resume: bool = False) -> Run:
    """Run all jobs of a configuration to the last training step, or all of its stages.

    >>> small = RunConfig.from_yaml("grpo_digits", ["trainer.steps=1", "trainer.batch_size=2"])
    >>> run(store, small).metrics("train/loss").height
    1

    With `resume`, continue where a run stopped. Raises the error that made it fail.
    """
    store = _opened(store)
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
    store: Address,
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
    """Train a model on the tasks of a store, or on its stored rows, and return the run.

    With `rewards` (or a section `explorer`) the model generates rollouts of the tasks and learns
    from them; without, it learns from the stored rows that match `where`.

    >>> def ones(task, experience):
    ...     return experience.response_text.count("1")
    >>> model = RunConfig.from_yaml("grpo_digits").model
    >>> run = train(store, model=model, rewards=ones, steps=2, trainer={"batch_size": 1})
    >>> run.run_id, run.metrics("train/reward_mean").columns, run.experiences().collect().height
    ('run-1', ['step', 'train/reward_mean'], 16)

    `model` is a folder, a Hugging Face name, or the section of that name. `algorithm` is a name,
    `{name: {parameter: value}}`, or an algorithm's class. `tasks` is an SQL condition over the
    table `tasks`, a function that yields tasks, or the section. `sections` are other sections of a
    configuration, such as `trainer={"batch_size": 16}` or `explorer={"sampling": {"max_tokens":
    256}}`. Without a `name`, it is the next free `run-N`; with `resume`, the newest run.
    """
    for key in sections.keys() - RunConfig.model_fields.keys():
        if close := closest(key, ("rewards", "steps", "where", "resume")):
            raise ConfigError(f"unknown parameter `{key}` of `train`; did you mean `{close}`?")
    store = _opened(store)
    if rewards is None and where is None and not sections.keys() & {"explorer", "trainer", "data"}:
        _log.warning("without `rewards` or `where` this trains on all stored rows")
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


def evaluate(store: Address, config: Config, *, version: int | None = None) -> Evaluation:
    """Evaluate the newest policy of a run, or another version, on the tasks of `evaluate.where`.

    >>> config = RunConfig.from_yaml("grpo_digits", ["evaluate.sampling.max_tokens=2"])
    >>> evaluate(store, config).num_tasks
    20
    """
    settings = _settings(config)
    with _shown(settings, None) as display:
        return evaluate_policy(_opened(store), settings, version=version, listener=display)


def serve(store: Address, config: Config) -> None:
    """Serve a run's policy through OpenAI's chat API until a signal ends it; see `rlake serve`.

    >>> serve(store, RunConfig.from_yaml("grpo_digits", ["serve.host=0.0.0.0"]))
    Traceback (most recent call last):
        ...
    rlake.store.errors.ConfigError: serving at `0.0.0.0` needs a token, ...
    """
    try:
        from .serving import access
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or "fastapi", "serve") from error
    settings = _settings(config)

    def ready(url: str, recovered: int) -> None:
        more = f"; recovered {recovered} sessions of an earlier server" if recovered else ""
        _log.warning("serving %s at %s%s; Ctrl-C ends it", settings.name, url, more)

    access.serve(_opened(store), settings, settings.serve or ServeConfig(), ready=ready)


def _opened(store: Address) -> Store:
    return store if isinstance(store, Store) else connect(store)


def _settings(config: Config) -> RunConfig:
    return config if isinstance(config, RunConfig) else load(config)


@contextmanager
def _shown(config: RunConfig, total_steps: int | None) -> Iterator[Display]:
    """Show progress; the error of an interrupt says how to continue."""
    try:
        with Display(config, total_steps=total_steps) as display:
            yield display
    except BaseException as error:
        # Not KeyboardInterrupt alone: DuckDB handles SIGINT first, and raises an error of its own.
        if not interrupts.caused(error):
            raise
        message = (
            f"run `{config.name}` was stopped; continue with the same call and `resume=True`, or "
            f"with `rlake.Run(store, {config.name!r}).resume()`"
        )
        raise KeyboardInterrupt(message) from error


def _weighted(rewards: Any) -> Any:
    if isinstance(rewards, str | Mapping):
        return rewards
    return dict.fromkeys(rewards if isinstance(rewards, Sequence) else [rewards], 1.0)


def _tasks(tasks: Any) -> Any:
    if callable(tasks):
        return {"generator": tasks}
    return {"where": tasks} if isinstance(tasks, str) else tasks


def _free_name(store: Store) -> str:
    taken = run_names(store)
    # one name more than there are runs: at least one of them is free
    return next(name for i in range(1, len(taken) + 2) if (name := f"run-{i}") not in taken)


def _newest_run(store: Store) -> str:
    found = store.sql(
        # by the table's own clock, since those of nodes differ
        "SELECT run_id FROM job_events WHERE job = 'train' AND status = 'running' "
        "ORDER BY created_at DESC LIMIT 1"
    ).fetchall()
    if not found:
        raise ConfigError("the store has no run to resume; leave `resume` out, or give a `name`")
    return found[0][0]
