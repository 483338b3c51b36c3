"""Check a configuration in a temporary store before a new store is created for it."""

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from ...store import Store, connect
from ...store.errors import ConfigError, QueryError, missing_extra
from ...store.files import open_input, scheme_of
from ...store.replay import Sampler
from ...store.replay.filters import Conditions
from ...store.side_columns import parse_all
from ...store.user_tables import PREFIX
from ..algorithms import Algorithm, resolve
from ..config import RunConfig
from ..evaluation.tasks import check_evaluation
from ..models.load import check_folder
from ..runs.job import Job
from ..schedule.samplers import check_runs, check_sides, nothing_to_draw, sampler
from ..schedule.units import batch_tasks
from ..tasks.curriculum.curriculum import plan
from ..tasks.prepare import bind, paths_of, prepare
from ..trainer.distributed.fitting import check_models
from ..trainer.memory import check_memory
from ..trainer.networks import build
from ..trainer.optimizers import Optimizers
from ..trainer.priority_updates import Priorities
from ..weight_sync.run_models import resolve_run_models


def rehearse(config: RunConfig, job: str) -> None:
    """Do what a job does before its first step or rollout, in a temporary store.

    `job` is run, explore, train, evaluate or serve. Raises what the job would raise. Files of rows
    are opened but not read.
    """
    with TemporaryDirectory(prefix="rlake-") as folder:
        store = connect(Path(folder) / "store")
        config = resolve_run_models(store, config)
        algorithm = resolve(config.algorithm)
        _try_networks(config, algorithm)
        if config.explorer is not None and config.explorer.engine.vllm and not find_spec("vllm"):
            raise missing_extra("vllm", "vllm")
        if job == "serve":
            return
        sources = [source for source in (config.tasks.path, config.data.file) if source]
        for source in sources:
            for path in paths_of(source):
                if scheme_of(path) is None:  # an address is copied as a whole when it is opened
                    with open_input(path, format=source.format, split=source.dataset_split):
                        pass
        if sources:  # the checks below depend on their content
            return
        prepare(store, config)
        if config.explorer is not None and job in ("run", "explore"):
            check_evaluation(store, config)
            group_size = config.explorer.group_size or algorithm.group_size
            plan(store, config, batch_size=batch_tasks(config, algorithm), group_size=group_size)
        if job in ("run", "train"):
            _try_draws(store, config, algorithm)


def bind_conditions(config: RunConfig) -> None:
    """Raise ConfigError, with its key, for a condition that names what no row has.

    It needs no store, and reads no row.
    """
    trainer, table = config.trainer, resolve(config.algorithm).table
    sides = parse_all(trainer.side_columns)
    of_tasks = {"tasks.where": config.tasks.where}
    if config.evaluate is not None:
        of_tasks["evaluate.where"] = config.evaluate.where
    of_rows = {"trainer.where": (trainer.where, sides)}
    of_rows["trainer.eval_where"] = (trainer.eval_where, sides)
    for name, source in (trainer.sampler.mixed or {}).items():
        every = (*sides, *parse_all(source.side_columns))
        of_rows[f"trainer.sampler.mixed.{name}.where"] = (source.where, every)
    with TemporaryDirectory(prefix="rlake-") as folder:
        store = connect(Path(folder) / "store")
        for key, where in of_tasks.items():
            if PREFIX not in where:  # the user's own tables are not in a temporary store
                bind(store, where, key=key)
        for key, (where, known) in of_rows.items():
            if PREFIX in (where or ""):
                continue
            try:
                Conditions(store, where=where, query=None, until=None, table=table, sides=known)
            except QueryError as error:
                raise ConfigError(f"`{key}`: {error}") from error


def _try_networks(config: RunConfig, algorithm: Algorithm) -> None:
    trainer = config.trainer
    frozen = [model for model in (trainer.reference, trainer.teacher) if model is not None]
    for model in (config.model, *frozen):
        if model.path is not None:
            check_folder(model.path)
    if trainer.critic.path is not None:
        check_folder(trainer.critic.path)
    is_small = (
        all(m.from_scratch is not None for m in (config.model, *frozen)) and not trainer.critic.path
    )
    check_models(config, algorithm)
    check_memory(config, algorithm)
    networks = build(config, algorithm)[0].trained if is_small else {"policy": nn.Linear(2, 2)}
    Optimizers(networks, trainer, total_steps=trainer.steps or 1)


def _try_draws(store: Store, config: RunConfig, algorithm: Algorithm) -> None:
    trainer = config.trainer
    check_runs(store, trainer.sampler.mixed or {})
    check_sides(store, config)
    drawing = sampler(store, config, algorithm)
    if trainer.priority_update is not None:
        Priorities(Job(store, config, "train", 1, Path()), trainer.priority_update)
    if trainer.eval_where is not None:
        sides = trainer.side_columns
        Sampler(store, where=trainer.eval_where, table=algorithm.table, with_columns=sides)
    if config.explorer is None:
        supply = drawing.supply(trainer.batch_size, 0)
        if not supply.fresh:
            raise nothing_to_draw(store, algorithm, supply)
