"""Publish weights: each version becomes a row of `policies`, which engines follow.

Through the store, a version is a folder, complete before its row is written. In memory or by
broadcast it is a copy in a `WeightCache`, and folders are written only for versions that a resumed
run can request: the first of each attempt, those that count at a checkpoint, and the last.
"""

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ...store import Store
from ...store.errors import ConfigError
from ..models import adapter_files, remote_weights
from ..models.atomic_folder import Writer, remove_folder, save_settings, write_folder, writing
from ..models.lora import has_adapter
from ..models.remote_weights import RemoteModel
from ..models.state_dict import cast, copied, state_of, weights_digest
from ..models.weights import WEIGHTS
from ..runs.job import Job
from ..runs.metrics import waiting
from .broadcast import Sender
from .memory import WeightCache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Publisher:
    """Publishes a policy's weights in the Hugging Face format; of an adapter, in peft's.

    Configuration and tokenizer are written once, and linked into each version's folder.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        run_id: str,
        attempt: int,
        tokenizer: "PreTrainedTokenizerFast",
        cache: WeightCache | None = None,
        sender: Sender | None = None,
        window: int = 0,
        needed: Callable[[Collection[int]], Collection[int]] = lambda versions: (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Publish through folders, or through a cache, from which a sender may send.

        Weights are rounded to `dtype`; those of an adapter stay as they are.

        The cache keeps versions at most `window` steps older than the newest, and older ones that
        `needed` returns; so do the folders.
        """
        self._store, self._folder, self._run, self._attempt = store, folder, run_id, attempt
        self._tokenizer = tokenizer
        self._cache, self._sender, self._window = cache, sender, window
        self._needed, self._dtype = needed, dtype
        self._has_published = False
        self._shared: list[Path] = []

    def publish(
        self,
        model: PreTrainedModel | RemoteModel,
        version: int,
        *,
        parent: int | None,
        parent_run_id: str | None = None,
    ) -> str:
        """Publish the weights of `version`; return their digest.

        `parent` is a version of this run, or of the run `parent_run_id`.
        """
        row = {
            "run_id": self._run,
            "attempt": self._attempt,
            "policy_version": version,
            "parent_version": parent,
            "parent_run_id": parent_run_id,
            "step": version,
            "path": str(self._target(version).relative_to(self._folder)),
        }
        remote = isinstance(model, RemoteModel)
        row |= self._keep_remote(model, version) if remote else self._keep(model, version)
        # The row comes last: an engine that sees it may load the weights at once.
        self._store.append("policies", [row])
        self._has_published = True
        return row["digest"]

    def _keep_remote(self, model: RemoteModel, version: int) -> dict[str, str]:
        """Keep weights at their server; the version's folder says where."""
        self.prepare(model.architecture)
        weights = model.save(f"v{version:06d}")
        files: dict[str, Writer] = {p.name: _link(p) for p in self._shared}
        write_folder(self._target(version), {**files, remote_weights.FILE: weights.write})
        return {"digest": weights.digest, "transport": "store"}

    def _keep(self, model: PreTrainedModel, version: int) -> dict[str, str]:
        """Write the version's folder, or keep a copy in memory."""
        target = self._target(version)
        # A cached version must not change while later steps update the model.
        dtype = None if has_adapter(model) else self._dtype
        state = cast(state_of(model), dtype) if self._cache is None else copied(model, dtype)
        digest = weights_digest(state)
        self.prepare(model)
        # Each attempt writes its first version: Ray workers and evaluations start from a folder.
        if self._cache is None or not self._has_published:
            self._write(target, state)
        if self._cache is not None:
            self._cache.put(version, digest, state)
            self._cache.forget(self._older(self._cache.all(), version - self._window))
        if self._sender is not None:
            address = self._sender.address
            return {"digest": digest, "transport": "broadcast", "address": address}
        return {"digest": digest, "transport": "store" if self._cache is None else "memory"}

    def settle(self) -> None:
        """Write the folders of versions that are only in memory, so that a run can be resumed."""
        for version, (_, state) in (self._cache.all() if self._cache else {}).items():
            if not self._target(version).exists():
                self._write(self._target(version), state)

    def forget(self, *, before: int) -> None:
        """Remove the folders of versions that can no longer be requested; their rows stay."""
        there = {int(p.name[1:]): p for p in (self._folder / "policies").glob("v*")}
        for version in self._older(there, before):
            remove_folder(there[version])

    def _older(self, versions: Collection[int], before: int) -> set[int]:
        old = {version for version in versions if version < before}
        return old - set(self._needed(old))

    def close(self) -> None:
        """Stop sending."""
        if self._sender is not None:
            self._sender.close()

    def prepare(self, model: PreTrainedModel) -> list[Path]:
        """Write the files that all versions share, once, and return their paths.

        Raises ConfigError if an adapter's base model differs from that at the start of the run.
        """
        if not self._shared:
            base = self._folder / "model"
            with writing(base, partial=base):
                base.mkdir(parents=True, exist_ok=True)
                if has_adapter(model):
                    adapter_files.write_settings(
                        model, base, run_folder=self._folder, tokenizer=self._tokenizer
                    )
                    self._tokenizer.save_pretrained(base)
                else:
                    save_settings(model, self._tokenizer, base, dtype=self._dtype)
            self._shared = sorted(p for p in base.iterdir() if p.is_file())
            self._name = adapter_files.WEIGHTS if has_adapter(model) else WEIGHTS
        return self._shared

    def _target(self, version: int) -> Path:
        return self._folder / "policies" / f"v{version:06d}"

    def _write(self, target: Path, state: Mapping[str, Tensor]) -> None:
        files: dict[str, Writer] = {p.name: _link(p) for p in self._shared}
        files[self._name] = lambda path: _save(state, path)
        write_folder(target, files)


def publisher(
    job: Job, tokenizer: "PreTrainedTokenizerFast", cache: WeightCache | None = None
) -> Publisher:
    """Return the publisher for the transport that a run configures.

    Raises ConfigError for the transport `memory` without a `cache`, which only an explorer in this
    process shares.
    """
    schedule, sender = job.config.schedule, None
    if job.config.explorer is None or schedule.weight_transport == "store":
        cache = None
    elif schedule.weight_transport == "broadcast":
        cache = WeightCache()
        sender = Sender(cache)
    elif cache is None:
        raise ConfigError(
            "`schedule.weight_transport` is memory, and explorer and trainer are two processes; "
            "start both with `rlake run`, or take store or broadcast"
        )
    return Publisher(
        job.store,
        job.folder,
        run_id=job.run_id,
        attempt=job.attempt,
        tokenizer=tokenizer,
        cache=cache,
        sender=sender,
        # The schedule asks for no version that is further behind the newest one.
        window=schedule.max_ahead + schedule.publish_every,
        needed=partial(waiting, job.store, job.config),
        dtype=getattr(torch, job.config.model.dtype),
    )


def _save(state: Mapping[str, Tensor], path: Path) -> None:
    # safetensors refuses views that are not contiguous
    whole = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(whole, str(path), metadata={"format": "pt"})


def _link(source: Path) -> Writer:
    def write(path: Path) -> None:
        try:
            os.link(source, path)
        except OSError:
            shutil.copyfile(source, path)  # across file systems, or on one without links

    return write
