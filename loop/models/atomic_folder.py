"""Folders that appear whole or not at all."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ...store.errors import StoreError
from ...store.files.atomic_writer import sync

Writer = Callable[[Path], object]
"""Writes one file to the path it is given."""


def write_folder(target: Path, files: Mapping[str, Writer], *, durable: bool = False) -> None:
    """Make a folder of files under another name, then rename it, so that it is never half there.

    `durable` waits until the disk has it. A folder that exists already is replaced. Raises
    StoreError when it cannot be written, as on a full disk; then the old folder is as it was.
    """

    def fill(partial: Path) -> None:
        for name, write in files.items():
            write(partial / name)
            if durable:
                sync(partial / name)

    replace_folder(target, fill, durable=durable)


def replace_folder(target: Path, fill: Callable[[Path], object], *, durable: bool) -> None:
    """Fill a folder beside `target`, then put it in its place; `durable` syncs it to the disk."""
    partial = partial_of(target)
    shutil.rmtree(partial, ignore_errors=True)
    with writing(target, partial=partial):
        partial.mkdir(parents=True)
        fill(partial)
    remove_folder(target)
    partial.rename(target)
    if durable:
        sync(target.parent)


def partial_of(target: Path) -> Path:
    """Return where a folder is filled before it takes its name."""
    return target.with_name(f".{target.name}.partial")


@contextmanager
def writing(target: Path, *, partial: Path) -> Iterator[None]:
    """Turn what libraries raise when they cannot write into StoreError, and remove `partial`."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # torch raises the last of these
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        raise StoreError(
            f"cannot write `{target}`: {reason}; nothing half-written is left"
        ) from error


def remove_folder(target: Path) -> None:
    """Remove a folder, if it is there, so that it is never half there."""
    gone = target.with_name(f".{target.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if target.exists():
        target.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
