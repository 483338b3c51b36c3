"""Tensors as files of a folder: each process writes its parts, and reads those it will hold."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.distributed_c10d import ProcessGroup

from .state_tree import space


def store(tensors: Mapping[str, Tensor], folder: Path, group: ProcessGroup | None) -> None:
    """Write tensors, together with the processes of a group; RuntimeError when that fails."""
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
    """Read all tensors of a folder, in parts where those that they are `like` lie in parts."""
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
    """Return in one line why a library could not read or write."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def _store_alone(tensors: dict[str, Tensor], writer: FileSystemWriter) -> None:
    """Do what `save` does, which warns when there is one process."""
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
    """Do what `load` does, which warns when there is one process."""
    planner = DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    plans = reader.prepare_global_plan(planner.create_global_plan([local]))
    reader.read_data(planner.finish_plan(plans[0]), planner).wait()
