"""Store what a run needs before it starts (tasks, rows, pairs), and select tasks by SQL."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from glob import glob
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl

from ...operators.import_path import find_function, taken_apart
from ...pipelines import expectations
from ...store import Store, Task
from ...store.errors import ConfigError, QueryError, nearest
from ...store.files import import_rows, matching, open_input, scheme_of
from ...store.image_parts import parts_of
from ...store.media import name_images
from ..config import RunConfig, TasksConfig
from ..config.tasks import SourceConfig
from . import sources

_log = logging.getLogger(__name__)


def prepare(store: Store, config: RunConfig) -> None:
    """Store the tasks and rows that the configuration generates; stored ones are left alone.

    Raises ConfigError when rows are to be generated and no task matches `tasks.where`, and JobError
    when the tasks are not as `expect.tasks` says.
    """
    prepare_tasks(store, config.tasks)
    _check_expected(store, config)
    if config.data.file is not None:
        _read(store, config.data.file.table, config.data.file)
    generator = config.data.generator
    if generator is None:
        return
    tasks = select(store, config.tasks.where)
    for table, rows in _call(generator, None, "row generator", tasks).items():
        store.append(table, list(rows))


def _check_expected(store: Store, config: RunConfig) -> None:
    expected, checked = config.expect.tasks, f"the tasks of run `{config.name}`"
    if not expected:
        return
    # the tasks of the run: others in the store may be as they like
    select = f"SELECT * FROM tasks_current AS tasks WHERE ({config.tasks.where}\n)"
    found = expectations.check(store, expected, checked, select=select, run_id=config.name)
    for warning in expectations.enforce(found, checked, stopped="the run does not start"):
        _log.warning("%s", warning)


def prepare_tasks(store: Store, config: TasksConfig) -> None:
    """Store the tasks that the configuration generates; stored ones are left alone."""
    if config.path is not None:
        source = config.path
        _read(store, "tasks", source, taskset=source.taskset, split=source.split)
    for name, params in _named(config.generator).items():
        tasks = list(_call({name: params}, sources, "task generator"))
        store.append("tasks", _with_images(store, tasks, source=name))


def _with_images(store: Store, tasks: list[Task], *, source: str) -> list[Task]:
    """Store the images that generated tasks bring, and name them by id."""
    shown = [i for i, task in enumerate(tasks) if any(parts_of(task.messages))]
    messages = name_images(store, [tasks[i].messages for i in shown], source=source)
    for i, named in zip(shown, messages, strict=True):
        tasks[i] = replace(tasks[i], messages=named)
    return tasks


def check_tasks(store: Store, where: str) -> None:
    """Raise ConfigError if no task matches `tasks.where`."""
    _matching(store, where, key="tasks.where", limit=1)


def check_mixture(store: Store, config: TasksConfig) -> None:
    """Raise ConfigError for a taskset of the mixture without a task that matches `tasks.where`."""
    found = store.sql(
        f"SELECT DISTINCT taskset FROM tasks_current AS tasks WHERE ({config.where}\n)"
    ).fetchall()
    known = {name for (name,) in found}
    for name in config.mixture or ():
        if name not in known:
            raise ConfigError(
                f"`tasks.mixture` names the taskset `{name}`, and no task of it matches "
                f"`tasks.where`{nearest(name, known)}"
            )


def bind(store: Store, where: str, *, key: str) -> None:
    """Raise ConfigError, with the configuration key, if a condition is not one on tasks."""
    _chosen(store, where, key=key, limit=0)


def select(store: Store, where: str, *, key: str = "tasks.where") -> list[Task]:
    """Return the tasks for which an SQL condition holds, ordered by id.

    Raises ConfigError when no task matches; `key` names the configuration key of the condition.
    """
    return [Task.from_row(row) for row in _matching(store, where, key=key).to_dicts()]


def _matching(store: Store, where: str, *, key: str, limit: int | None = None) -> pl.DataFrame:
    rows = _chosen(store, where, key=key, limit=limit)
    if rows.is_empty():
        raise ConfigError(
            f"no task matches `{where}`, the store has {store.count('tasks')}; import some with "
            f"`rlake import tasks`, or change `{key}`"
        )
    return rows


def _chosen(store: Store, where: str, *, key: str, limit: int | None) -> pl.DataFrame:
    # by id: a curriculum refers to tasks by their index
    few = "ORDER BY task_id" if limit is None else f"LIMIT {limit}"
    try:
        return store.sql(f"SELECT * FROM tasks_current AS tasks WHERE ({where}\n) {few}").pl()
    except QueryError as error:
        raise ConfigError(f"`{key}`: {error}") from error


def check(config: RunConfig) -> None:
    """Raise ConfigError when a source of rows, or the function in `data`, does not exist."""
    for key, source in (("tasks.path", config.tasks.path), ("data.file", config.data.file)):
        for path in source.path if source else ():
            if scheme_of(path) is None and not glob(str(Path(path).expanduser()), recursive=True):  # noqa: PTH207 - it may be absolute
                raise ConfigError(f"`{key}`: the file `{path}` does not exist")
    generator = config.data.generator
    if generator is not None:
        find_function(taken_apart(generator, "`data.generator`")[0], None, "row generator")


def paths_of(source: SourceConfig) -> list[str]:
    """Return the files and addresses of a source."""
    return matching([p if scheme_of(p) else Path(p).expanduser() for p in source.path])


def _read(store: Store, table: str, source: SourceConfig, **tasks: Any) -> None:
    opening = partial(open_input, format=source.format, split=source.dataset_split)
    with ExitStack() as opened:
        files = [opened.enter_context(opening(path)) for path in paths_of(source)]
        import_rows(store, table, files, sql=source.sql, **tasks)


def _named(spec: str | Mapping[str, Mapping[str, Any]] | None) -> Mapping[str, Mapping[str, Any]]:
    return {spec: {}} if isinstance(spec, str) else spec or {}


def _call(
    spec: str | Mapping[str, Mapping[str, Any]], home: ModuleType | None, what: str, *given: object
) -> Any:
    """Call the function that `name` or `{name: {parameter: value}}` names, on what it is given."""
    name, params = taken_apart(spec, f"a {what}")
    try:
        return find_function(name, home, what)(*given, **params)
    except TypeError as error:
        raise ConfigError(f"the {what} `{name}` cannot be called so: {error}") from error
