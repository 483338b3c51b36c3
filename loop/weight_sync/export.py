"""A run's weights as a folder of their own, for those who know nothing of runs."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from ...store import Store
from ...store.errors import ConfigError, NotFoundError, nearest
from ..models import adapter_files
from ..models.atomic_folder import remove_folder, writing
from ..models.load import load_folder
from ..models.lora import merge as merge_adapter
from . import PublishedWeights, check_weights, published


@dataclass(frozen=True)
class Exported:
    """What was written."""

    version: int
    kind: str
    """model, adapter, or merged: a model that an adapter has become part of."""


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

    An adapter becomes part of its model, or with `merge` false it stays one, in peft's format.
    `folder` is the run's, where that is not in the store's. The folder appears whole or not at all.
    Raises NotFoundError when the run has published nothing, ConfigError for a version that is not
    there and for an `out` that exists, JobError for damaged weights, StoreError when it cannot be
    written.
    """
    if out.exists():
        raise ConfigError(f"cannot write to `{out}`: it exists; name a new folder")
    weights = _weights(store, run_id, version, folder)
    check_weights(weights)
    is_adapter = adapter_files.is_adapter(weights.folder)
    partial = out.with_name(f".{out.name}.partial")
    remove_folder(partial)
    with writing(out, partial=partial):
        partial.parent.mkdir(parents=True, exist_ok=True)
        if is_adapter and merge:
            _write_merged(weights.folder, partial)
        else:
            shutil.copytree(weights.folder, partial)
        if is_adapter and not merge:
            _name_base(weights.folder, partial)
        partial.rename(out)
    return Exported(
        weights.version, "model" if not is_adapter else "merged" if merge else "adapter"
    )


def _weights(
    store: Store, run_id: str, version: int | None, folder: Path | None
) -> PublishedWeights:
    if folder is None and store.runs_folder is None:
        raise ConfigError("the store is no local folder: say with `--folder` where the run's is")
    place = folder or (store.runs_folder or Path()) / run_id
    found = published(store, place, run_id)
    if not found:
        known = [r for (r,) in store.sql("SELECT DISTINCT run_id FROM policies").fetchall()]
        raise NotFoundError(f"run `{run_id}` has published no weights{nearest(run_id, known)}")
    weights = found.get(max(found) if version is None else version)
    if weights is None:
        there = sorted(v for v, w in found.items() if w.folder.is_dir())
        raise ConfigError(f"run `{run_id}` has no weights of version {version}; there are {there}")
    if not place.is_dir():
        raise ConfigError(
            f"there is no folder `{place}`; if the run was configured with an `output`, name its "
            "folder there with `--folder`"
        )
    return weights


def _write_merged(source: Path, target: Path) -> None:
    model, tokenizer = load_folder(source)
    merge_adapter(model)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _name_base(source: Path, target: Path) -> None:
    """Say where the model below lies in a way that does not depend on the adapter's folder."""
    place, digest = adapter_files.base_of(source)
    place = str(Path(place).resolve()) if Path(place).is_dir() else place
    (target / adapter_files.BASE).write_text(json.dumps({"path": place, "digest": digest}))
    settings = json.loads((target / adapter_files.SETTINGS).read_text())
    settings["base_model_name_or_path"] = place
    (target / adapter_files.SETTINGS).write_text(json.dumps(settings, indent=2))
