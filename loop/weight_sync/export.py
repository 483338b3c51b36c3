"""Export the weights of a run as a Hugging Face folder for other tools."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from ...store import Store
from ...store.errors import ConfigError
from ..models import adapter_files
from ..models.atomic_folder import replace_folder, save_model
from ..models.load import load_folder
from ..models.lora import merge as merge_adapter
from ..models.weights import PublishedWeights, check_weights
from .subscriber import find_version


@dataclass(frozen=True)
class Exported:
    """The version that was written, and its kind."""

    version: int
    kind: str
    """model, adapter, or merged: a model with an adapter merged into it."""


def export_model(
    store: Store,
    run_id: str,
    out: Path,
    *,
    version: int | None = None,
    merge: bool = True,
    folder: Path | None = None,
) -> Exported:
    """Write the newest weights of a run, or those of a version, to a new Hugging Face folder.

    An adapter is merged into its model; with `merge` false it stays one, in peft's format. `folder`
    is the run's, if it is not in the store's. Raises NotFoundError if the run has published
    nothing, ConfigError for a missing version or an existing `out`, JobError for damaged weights,
    and StoreError if the folder cannot be written; then nothing of it is left.
    """
    if out.exists():
        raise ConfigError(f"cannot write to `{out}`: it exists; name a new folder")
    weights = _weights(store, run_id, version, folder)
    check_weights(weights)
    is_adapter = adapter_files.is_adapter(weights.folder)
    kind = "model" if not is_adapter else "merged" if merge else "adapter"

    def fill(partial: Path) -> None:
        if kind == "merged":
            _write_merged(weights.folder, partial)
        else:
            shutil.copytree(weights.folder, partial, dirs_exist_ok=True)
        if kind == "adapter":
            adapter_files.name_base(weights.folder, partial)

    # Not synced to the disk: an export can be made again.
    replace_folder(out, fill, durable=False)
    return Exported(weights.version, kind)


def _weights(
    store: Store, run_id: str, version: int | None, folder: Path | None
) -> PublishedWeights:
    if folder is None and store.runs_folder is None:
        raise ConfigError("the store is not a local folder; name the run's with `--folder`")
    place = folder or (store.runs_folder or Path()) / run_id
    weights = find_version(store, place, run_id, version)
    if not place.is_dir():
        raise ConfigError(
            f"the folder `{place}` does not exist; if the run was configured with an `output`, "
            "name its folder there with `--folder`"
        )
    return weights


def _write_merged(source: Path, target: Path) -> None:
    model, tokenizer = load_folder(source)
    merge_adapter(model)
    save_model(model, tokenizer, target)
