"""Write model folders that other loaders accept, completely or not at all."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from ...store.errors import StoreError, message_of
from ...store.files.atomic_writer import sync
from .images import write_processor

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Writer = Callable[[Path], object]
"""Writes one file to the path it is given."""


def save_settings(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast",
    folder: Path,
    *,
    dtype: "torch.dtype | None" = None,
) -> None:
    """Write everything of a model's folder but its weights: configuration and tokenizer.

    `dtype` is the type of the weights in the folder; None: that of the model.


    transformers fills in `architectures` and `dtype` only when it saves the weights too, and a
    server such as vLLM or SkyRL refuses a `config.json` without them.
    """
    # FSDP gives a sharded model a class of torch's own in front of the model's
    kinds = (k.__name__ for k in type(model).__mro__ if not k.__module__.startswith("torch."))
    model.config.architectures = [next(kinds)]
    model.config.dtype = dtype or model.dtype
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_processor(model.config, folder)


def save_model(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", folder: Path
) -> None:
    """Write a whole model into a folder: weights, configuration, tokenizer, image processor."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_processor(model.config, folder)


def write_folder(target: Path, files: Mapping[str, Writer], *, durable: bool = False) -> None:
    """Write a folder under another name, then rename it, so that it is never incomplete.

    `durable` waits until it is on the disk. An existing folder is replaced. Raises StoreError if it
    cannot be written, as on a full disk; then the old folder is unchanged.
    """

    def fill(partial: Path) -> None:
        for name, write in files.items():
            write(partial / name)
            if durable:
                sync(partial / name)

    replace_folder(target, fill, durable=durable)


def replace_folder(target: Path, fill: Callable[[Path], object], *, durable: bool) -> None:
    """Fill a folder next to `target`, then rename it; `durable` syncs it to the disk."""
    partial = partial_of(target)
    shutil.rmtree(partial, ignore_errors=True)
    with writing(target, partial=partial):
        # `exist_ok`: the other ranks of a checkpoint create it too, but write only together with
        # this process, in `fill`.
        partial.mkdir(parents=True, exist_ok=True)
        fill(partial)
    remove_folder(target)  # only now: if `fill` fails, the old folder is still there
    partial.rename(target)
    if durable:
        sync(target.parent)  # the new name must reach the disk too


def partial_of(target: Path) -> Path:
    """Return the path of a folder while it is written."""
    return target.with_name(f".{target.name}.partial")


@contextmanager
def writing(target: Path, *, partial: Path) -> Iterator[None]:
    """Turn the errors of libraries that cannot write into StoreError, and remove `partial`."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # torch raises the last of these
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or message_of(error)
        raise StoreError(
            f"cannot write `{target}`: {reason}; nothing half-written is left"
        ) from error


def remove_folder(target: Path) -> None:
    """Remove a folder if it exists; a reader never sees it incomplete."""
    gone = target.with_name(f".{target.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if target.exists():
        # Renamed first: an interrupted removal leaves only a name that nothing reads.
        target.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
