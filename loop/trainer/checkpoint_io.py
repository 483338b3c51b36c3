"""Read and write training state: nested dicts as named tensors, sharded over processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...operators.import_path import import_from
from ...store.errors import message_of


def store(tensors: Mapping[str, Tensor], folder: Path, group: ProcessGroup | None) -> None:
    """Write tensors, with all processes of a group; RuntimeError if that fails."""
    writer = FileSystemWriter(folder)
    if group is None:
        _store_alone(dict(tensors), writer)
        return
    try:
        save(dict(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise RuntimeError(reason(error)) from error


def fetch(
    folder: Path, like: Mapping[str, Tensor], group: ProcessGroup | None
) -> dict[str, Tensor]:
    """Read all tensors of a folder, sharded where those that they are `like` are."""
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        name: space(name, message.size, message.properties.dtype, like)
        for name, message in stored.items()
        if isinstance(message, TensorStorageMetadata)
    }
    if group is None:
        _fetch_alone(tensors, reader)
    else:
        load(tensors, storage_reader=reader, process_group=group)
    return tensors


def reason(error: BaseException) -> str:
    """Return the first cause of an error in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return message_of(error)


def _store_alone(tensors: dict[str, Tensor], writer: FileSystemWriter) -> None:
    """Do what `save` does, which warns if torch.distributed is not initialized."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    written = writer.write_data(plan, planner)
    written.wait()
    writer.finish(metadata, [written.value()])


@torch.no_grad()
def _fetch_alone(tensors: dict[str, Tensor], reader: FileSystemReader) -> None:
    """Do what `load` does, which warns if torch.distributed is not initialized."""
    planner = DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    plans = reader.prepare_global_plan(planner.create_global_plan([local]))
    reader.read_data(planner.finish_plan(plans[0]), planner).wait()


# With a space, unlike the names of parameters and options: no key of a state looks like it.
_PLACE = "the tensor"
_CLASS, _PARTS = "the class", "its tensors"


def apart(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Split a state into its tensors by path, and the rest, which refers to them.

    >>> tensors, rest = apart({"a": {"b": torch.ones(1), "c": 2}})
    >>> list(tensors), rest
    (['a/b'], {'a': {'b': {'the tensor': 'a/b'}, 'c': 2}})
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, path: str) -> Any:
        if is_traceable_wrapper_subclass(node) and not isinstance(node, DTensor):
            # a tensor made of others, as those of 8-bit optimizers, which the writer does not know
            names, context = node.__tensor_flatten__()
            kind = f"{type(node).__module__}:{type(node).__qualname__}"
            parts = {name: walk(getattr(node, name), f"{path}/{name}") for name in names}
            return {_CLASS: kind, _PARTS: parts, "context": context, "size": tuple(node.shape)}
        if isinstance(node, Tensor):
            tensors[path] = node
            return {_PLACE: path}
        if isinstance(node, Mapping):
            return {k: walk(v, f"{path}/{k}" if path else str(k)) for k, v in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(walk(v, f"{path}/{i}") for i, v in enumerate(node))
        return node

    rest = walk(state, "")
    return tensors, rest


def together(tensors: Mapping[str, Tensor], rest: Any) -> Any:
    """Merge tensors and rest into the state that `apart` split."""
    if isinstance(rest, dict):
        if list(rest) == [_PLACE]:
            return tensors[rest[_PLACE]]
        if _CLASS in rest:
            kind: Any = import_from(rest[_CLASS], "tensor", form="Class")
            parts = together(tensors, rest[_PARTS])
            return kind.__tensor_unflatten__(parts, rest["context"], rest["size"], None)
        return {k: together(tensors, v) for k, v in rest.items()}
    if isinstance(rest, list | tuple):
        return type(rest)(together(tensors, v) for v in rest)
    return rest


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, shard by shard, so that training can continue."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    return BlockingAsyncStager().stage(dict(tensors))


def space(path: str, size: torch.Size, dtype: torch.dtype, like: Mapping[str, Tensor]) -> Tensor:
    """Allocate a tensor, sharded if `like` has a sharded one of the same size.

    `like` has it under its own path, or under its parent's: optimizer states are under the path of
    their parameter.
    """
    model = like.get(path, like.get(path.rpartition("/")[0]))
    if isinstance(model, DTensor) and model.shape == size:
        return torch.empty_like(model, dtype=dtype)
    return torch.empty(size, dtype=dtype)
