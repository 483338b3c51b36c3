"""What a run stores before it begins: its tasks, and rows to imitate or to choose between."""

from pathlib import Path

from ...store import Store
from ...store.errors import ConfigError
from ...store.files import import_rows, open_input
from ..config import RunConfig
from ..config.resolve import call, function
from ..config.tasks import FileConfig
from ..recipes.toys import expert_data
from . import select as tasks_module


def prepare(store: Store, config: RunConfig) -> None:
    """Store the tasks and rows that the configuration makes; those that are there are left alone.

    Raises ConfigError when rows are to be made and no task matches `tasks.where`.
    """
    tasks_module.prepare(store, config.tasks)
    if config.data.file is not None:
        _read(store, config.data.file)
    make = config.data.generator
    if make is None:
        return
    tasks = tasks_module.select(store, config.tasks.where)
    for table, rows in call(make, expert_data, "row maker", tasks).items():
        store.append(table, list(rows))


def _read(store: Store, file: FileConfig) -> None:
    """Store the rows of a file; a second time adds nothing."""
    with open_input(Path(file.path).expanduser(), format=file.format) as source:
        import_rows(store, file.table, source, sql=file.sql)


def check(config: RunConfig) -> None:
    """Look up what a configuration names; ConfigError for a function or file that is not there."""
    file = config.data.file
    if file is not None and not Path(file.path).expanduser().exists():
        raise ConfigError(f"`data.file`: there is no file `{file.path}`")
    if config.data.generator is not None:
        make = config.data.generator
        function(make if isinstance(make, str) else next(iter(make)), expert_data, "row maker")
