"""A configuration is tried on a store of its own before a new store is made for it."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from ...store import Store, connect
from ...store.errors import NotAStoreError, missing_extra
from ...store.files import open_input
from ...store.replay import Sampler
from ..algorithms import Algorithm, resolve
from ..config import RunConfig
from ..evaluation.tasks import check_measured
from ..models.load import check_folder
from ..runs.job import Job
from ..schedule.samplers import check_runs, check_sides, nothing_to_draw, sampler
from ..schedule.units import batch_tasks
from ..tasks.curriculum.curriculum import plan
from ..tasks.prepare import prepare
from ..trainer.networks import build
from ..trainer.optimizers import Optimizers
from ..trainer.priority_updates import Priorities
from ..weight_sync.run_models import resolve_run_models


def open_new(place: str, rehearsal: Callable[[], object], *, create: bool = True) -> Store:
    """Open a store; one that is not there is made only when the rehearsal raises nothing."""
    try:
        return connect(place, create=False)
    except NotAStoreError:
        if not create or _holds_something(place):
            raise
    rehearsal()
    return connect(place)


def _holds_something(place: str) -> bool:
    path = Path(place).expanduser()
    return "://" not in place and (path.is_file() or (path.is_dir() and any(path.iterdir())))


def rehearse(config: RunConfig, job: str) -> None:
    """Do what a job does before its first step or try, in a store that is thrown away.

    `job` is run, explore, train, evaluate or serve. Raises what the job would raise. Files of rows
    are opened, and not read.
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
        file = config.data.file
        if file is not None:  # what it holds decides all that follows
            with open_input(Path(file.path).expanduser(), format=file.format):
                return
        prepare(store, config)
        if config.explorer is not None and job in ("run", "explore"):
            check_measured(store, config)
            group_size = config.explorer.group_size or algorithm.group_size
            plan(store, config, batch_size=batch_tasks(config, algorithm), group_size=group_size)
        if job in ("run", "train"):
            _try_draws(store, config, algorithm)


def _try_networks(config: RunConfig, algorithm: Algorithm) -> None:
    trainer = config.trainer
    beside = [model for model in (trainer.reference, trainer.teacher) if model is not None]
    for model in (config.model, *beside):
        if model.path is not None:
            check_folder(model.path)
    if trainer.critic.path is not None:
        check_folder(trainer.critic.path)
    is_small = (
        all(m.from_scratch is not None for m in (config.model, *beside)) and not trainer.critic.path
    )
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
        columns = trainer.side_columns
        Sampler(
            store,
            where=trainer.eval_where,
            table=algorithm.table,
            with_columns=columns,
        )
    if config.explorer is None:
        supply = drawing.supply(trainer.batch_size, 0)
        if not supply.fresh:
            raise nothing_to_draw(store, algorithm, supply)
