"""The trainer's side: each version becomes a row of `policies`, and gets to who follows it.

Through the store, a version is a folder written whole, then the row. Held in memory, or sent, it
is a copy on a shelf, then the row; folders are written only of what a resumed run can ask for: the
first version of each attempt, those that count at a checkpoint, and the last.
"""

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ...store import Store
from ...store.errors import ConfigError
from ..models import adapter_files
from ..models.atomic_folder import Writer, remove_folder, write_folder, writing
from ..models.digest import weights_digest
from ..models.lora import has_adapter
from ..models.state_dict import copied, state_of
from ..models.weights import WEIGHTS
from ..runs.eval_schedule import waiting
from ..runs.job import Job
from .broadcast import Sender
from .memory import WeightCache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Publisher:
    """Writes a policy's weights where explorers find them, each version in the Hugging Face format.

    Of a policy with an adapter, only that, in peft's format. Configuration and tokenizer are
    written once, and linked into each version's folder.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        run_id: str,
        attempt: int,
        tokenizer: "PreTrainedTokenizerFast",
        shelf: WeightCache | None = None,
        sender: Sender | None = None,
        window: int = 0,
        needed: Callable[[Collection[int]], Collection[int]] = lambda versions: (),
    ) -> None:
        """Publish through folders, or else through a shelf, which a sender may send from.

        On the shelf stay the versions that are at most `window` steps older than the newest. Of
        older ones, there and in folders, those stay that `needed` says are.
        """
        self._store, self._folder, self._run, self._attempt = store, folder, run_id, attempt
        self._tokenizer = tokenizer
        self._shelf, self._sender, self._window = shelf, sender, window
        self._needed = needed
        self._has_published = False
        self._shared: list[Path] = []

    def publish(
        self,
        model: PreTrainedModel,
        version: int,
        *,
        parent: int | None,
        parent_run_id: str | None = None,
    ) -> str:
        """Hand over the weights of `version`, then write its row; return their digest.

        `parent` is a version of this run, or of the run `parent_run_id`.
        """
        target = self._target(version)
        state = state_of(model) if self._shelf is None else copied(model)
        digest = weights_digest(state)
        self.prepare(model)
        if self._shelf is None or not self._has_published:
            self._write(target, state)
        if self._shelf is not None:
            self._shelf.put(version, digest, state)
            self._shelf.forget(self._older(self._shelf.all(), version - self._window))
        row = {
            "run_id": self._run,
            "attempt": self._attempt,
            "policy_version": version,
            "parent_version": parent,
            "parent_run_id": parent_run_id,
            "step": version,
            "path": str(target.relative_to(self._folder)),
            "digest": digest,
            "transport": self._transport,
        }
        self._store.append("policies", [row])
        self._has_published = True
        return digest

    def settle(self) -> None:
        """Write the folders of what is held in memory only.

        A run that is resumed here finds every version that it may ask for and not train again.
        """
        for version, (_, state) in (self._shelf.all() if self._shelf else {}).items():
            if not self._target(version).exists():
                self._write(self._target(version), state)

    def forget(self, *, before: int) -> None:
        """Remove the folders of versions that nobody can ask for any more; their rows stay."""
        there = {int(p.name[1:]): p for p in (self._folder / "policies").glob("v*")}
        for version in self._older(there, before):
            remove_folder(there[version])

    def _older(self, versions: Collection[int], before: int) -> set[int]:
        old = {version for version in versions if version < before}
        return old - set(self._needed(old))

    def close(self) -> None:
        """Send nothing more."""
        if self._sender is not None:
            self._sender.close()

    def prepare(self, model: PreTrainedModel) -> list[Path]:
        """Write what is the same for all versions, once, and return where it lies.

        Raises ConfigError when an adapter's model is another than when the run was started.
        """
        if not self._shared:
            base = self._folder / "model"
            with writing(base, partial=base):
                base.mkdir(parents=True, exist_ok=True)
                self._write_settings(model, base)
                self._tokenizer.save_pretrained(base)
            self._shared = sorted(p for p in base.iterdir() if p.is_file())
            self._name = adapter_files.WEIGHTS if has_adapter(model) else WEIGHTS
        return self._shared

    @property
    def _transport(self) -> str:
        if self._sender is not None:
            return f"broadcast from {self._sender.address}"
        return "store" if self._shelf is None else "memory"

    def _target(self, version: int) -> Path:
        return self._folder / "policies" / f"v{version:06d}"

    def _write(self, target: Path, state: Mapping[str, Tensor]) -> None:
        files: dict[str, Writer] = {p.name: _link(p) for p in self._shared}
        files[self._name] = lambda path: _save(state, path)
        write_folder(target, files)

    def _write_settings(self, model: PreTrainedModel, base: Path) -> None:
        if has_adapter(model):
            adapter_files.write_settings(
                model, base, run_folder=self._folder, tokenizer=self._tokenizer
            )
            return
        model.config.save_pretrained(base)
        if model.can_generate():
            model.generation_config.save_pretrained(base)


def publisher(
    job: Job, tokenizer: "PreTrainedTokenizerFast", shelf: WeightCache | None = None
) -> Publisher:
    """Return what publishes a trainer's weights as its run wants it.

    Raises ConfigError when they are to stay in memory, and the explorer is in another process, with
    which no `shelf` is shared.
    """
    schedule, sender = job.config.schedule, None
    if job.config.explorer is None or schedule.weight_transport == "store":
        shelf = None
    elif schedule.weight_transport == "broadcast":
        shelf = WeightCache()
        sender = Sender(shelf)
    elif shelf is None:
        raise ConfigError(
            "`schedule.weight_transport` is memory, and explorer and trainer are two "
            "processes; start both "
            "with `rlake run`, or take store or broadcast"
        )
    return Publisher(
        job.store,
        job.folder,
        run_id=job.run_id,
        attempt=job.attempt,
        tokenizer=tokenizer,
        shelf=shelf,
        sender=sender,
        window=schedule.max_ahead + schedule.publish_every,
        needed=partial(waiting, job.store, job.config),
    )


def _save(state: Mapping[str, Tensor], path: Path) -> None:
    whole = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(whole, str(path), metadata={"format": "pt"})


def _link(source: Path) -> Writer:
    def write(path: Path) -> None:
        try:
            os.link(source, path)
        except OSError:
            shutil.copyfile(source, path)  # another file system, or one without links

    return write
