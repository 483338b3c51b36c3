"""The Ray executor: Ray Data's tasks process partitions, and read the rows themselves."""

import logging
import pickle
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from ...store import Store
from ...store.errors import RlakeError, missing_extra
from ..cache import OperatorCache
from ..running.apply_stage import StageWork, Treated, treat
from ..running.staged_rows import Part
from .local import PART_BYTES


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Ray:
    """Tasks of Ray Data; parts come back in order, and few are in progress at once.

    Uses the Ray that runs in this process, else the one at `address`, else starts and stops one. A
    task gets the addresses of its rows and reads the store itself, so all nodes must have access to
    the store, and to `folder`, where rows between stages are stored.
    """

    name: ClassVar[str] = "ray"
    in_files: ClassVar[bool] = True
    tasks: PositiveInt = 2
    """At once."""
    part_bytes: PositiveInt = PART_BYTES
    """Estimated bytes of the rows of a part."""
    address: str | None = None
    folder: str | None = None
    """Where rows between stages are stored; None: the folder for temporary files."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start Ray unless it runs, and stop it afterwards."""
        ray = _ray()
        if ray.is_initialized():
            yield
            return
        with warnings.catch_warnings():
            # Ray starts its own programs; none of them goes on in a fork of this process
            warnings.filterwarnings("ignore", "lance is not fork-safe")
            ray.init(
                address=self.address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # a run's own report says enough
        try:
            yield
        finally:
            ray.shutdown()

    def treated(
        self, work: StageWork, parts: Sequence[Part], store: Store, cache: OperatorCache
    ) -> Iterator[Treated]:
        """Yield the outcome of each part, in order; raises what an operator raised in a task."""
        if not parts:
            return
        ray, data = _ray(), _ray().data
        where = (store.root, store.storage_options, store.branch_name)
        shared = ray.put((work, where))
        task = _Task(shared, [ray.put(part) for part in parts])
        context = data.DataContext.get_current()
        # the settings belong to the process, and a user's own jobs run in it too
        before = context.execution_options.preserve_order, context.enable_progress_bars
        context.execution_options.preserve_order, context.enable_progress_bars = True, False
        try:
            rows = data.range(len(parts), override_num_blocks=len(parts)).map_batches(
                task, batch_size=1, batch_format="pyarrow", concurrency=min(self.tasks, len(parts))
            )
            for batch in rows.iter_batches(
                batch_size=1, batch_format="pyarrow", prefetch_batches=0
            ):
                made = pickle.loads(batch.column("made")[0].as_py())
                if isinstance(made, RlakeError):
                    raise made
                yield made
        finally:
            context.execution_options.preserve_order, context.enable_progress_bars = before


class _Task:
    """A task: it reads one part and applies the operators."""

    def __init__(self, shared: Any, parts: Sequence[Any]) -> None:
        self._shared, self._parts = shared, parts

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Return the pickled outcome of the part with this number, or the error."""
        ray = _ray()
        work, (root, options, branch) = ray.get(self._shared)
        [number] = batch.column("id").to_pylist()
        store = Store(root, storage_options=options, branch=branch)
        try:
            made: Treated | RlakeError = treat(
                work, ray.get(self._parts[number]), OperatorCache(store)
            )
        except RlakeError as error:
            error.__cause__ = None  # it may be of a kind that cannot be sent
            made = error
        return pa.table({"made": pa.array([pickle.dumps(made)], pa.large_binary())})


def _ray() -> Any:
    try:
        import ray
        import ray.cloudpickle
        import ray.data
    except ImportError as error:
        raise missing_extra("ray", "ray") from error
    # Polars sends the Python functions in expressions by this module, and Ray brings its own copy
    sys.modules.setdefault("cloudpickle", ray.cloudpickle)
    return ray
