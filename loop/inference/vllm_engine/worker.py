"""Methods that rlake adds to vLLM's workers: load weights, and verify what the model holds.

vLLM mixes the class into its own workers (`worker_extension_cls`), in the processes that hold the
weights; rlake's own process never imports this module.
"""

import os
import select
import signal
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ...models.state_dict import weights_digest
from .logprobs import keep_full_logprobs

COLUMNS = 512
"""Columns of a packed matrix that are read back; a wider one is sampled evenly."""


class Worker:
    """An extension of vLLM's worker."""

    model_runner: Any
    vllm_config: Any

    def end_with(self, host: str, pid: int) -> None:
        """Kill this worker when rlake's process ends, however it ends.

        vLLM's engine process outlives a parent that is killed, and would keep the memory of the
        GPU. A worker on another host cannot see the process, and stays.
        """
        if host == socket.gethostname():
            ended = os.pidfd_open(pid)
            threading.Thread(target=_end_after, args=(ended,), daemon=True).start()

    def refuses(self) -> str | None:
        """Return why this model cannot be served, where only its first request would show it."""
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        if not current_platform.is_cpu():
            return None
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # pyright: ignore[reportMissingImports]

        size = self.vllm_config.model_config.get_head_size()
        known = list(CPUAttentionBackend.get_supported_head_sizes())
        if size in known:
            return None
        return f"its attention heads have {size} dimensions; on CPUs vLLM serves {known}"

    def gives_full_logprobs(self) -> str | None:
        """Make log-probs those of the full distribution; return why that is impossible."""
        sampler = self.model_runner.sampler  # only the last of several stages has one
        grammars = getattr(self.model_runner, "structured_outputs_worker", None)
        if sampler is None or keep_full_logprobs(sampler, grammars):
            return None
        return f"its sampler `{type(sampler).__name__}` is unknown, so its log-probs are too"

    def take_in(self, folder: str, digest: str) -> dict[str, Any]:
        """Load a folder's weights if they have this digest, and compare what the model then holds.

        The digest is computed from the tensors that are loaded, so no file can change in between.
        Returns either `refused`, the reason why nothing changed, or the number of tensors `given`,
        the number `compared` with what the model multiplies with, and the names that `differ`.
        """
        path = Path(folder) / "model.safetensors"
        try:
            given = load_file(path)
        except (OSError, SafetensorError) as error:
            return {"refused": f"`{path}` cannot be read: {error}"}
        if (found := weights_digest(given)) != digest:
            return {"refused": f"`{path}` has digest {found}, expected {digest}"}
        model = self.model_runner.get_model()
        given = _named(given, model)
        self.model_runner.reload_weights(weights_iterator=iter(given.items()))
        if (head := _tied_head(model)) is not None:
            given["lm_head.weight"] = given[head]
        compared, differ = differences(model, given)
        return {"given": len(given), "compared": compared, "differ": differ}


def _end_after(pidfd: int) -> None:
    select.select([pidfd], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _named(given: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename tied weights, which are given once, to the names that this model uses.

    vLLM ties them only if the folder that it started with had one name for them.
    """
    state, held = dict(given), {name for name, _ in model.named_parameters()}
    embedding = next((name for name in held if name.endswith("embed_tokens.weight")), None)
    tied = {"lm_head.weight", embedding}
    if embedding is not None and len(known := tied & state.keys()) == 1:
        tensor = state.pop(next(iter(known)))
        state |= dict.fromkeys(tied & held, tensor)
    return state


def _tied_head(model: nn.Module) -> str | None:
    """Tie the head to the reloaded embedding; return the embedding's name, or None if not tied.

    A reload replaces the embedding's tensor; the head's, and its packed form for a CPU's kernel,
    would stay the old ones.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    head: Any = modules.get("lm_head")
    name = next((n for n in modules if n.endswith("embed_tokens")), None)
    config = getattr(model, "config", None)
    if head is None or name is None or not getattr(config, "tie_word_embeddings", False):
        return None
    embedding: Any = modules[name]
    if not isinstance(getattr(head, "weight", None), Tensor):
        return None
    head.weight = embedding.weight
    head.quant_method.process_weights_after_loading(head)
    return f"{name}.weight"


@torch.inference_mode()
def differences(model: nn.Module, given: Mapping[str, Tensor]) -> tuple[int, list[str]]:
    """Compare a model's weights with those of a file, wherever vLLM put them.

    Returns how many were compared, and the names of those that differ. Weights that vLLM shards
    over several GPUs, or holds in another form, are not compared.
    """
    compared, differ = 0, []
    for name, tensor in given.items():
        path, _, leaf = name.rpartition(".")
        module, first = _module(model, path, leaf, given)
        columns = None
        if tensor.dim() == 2:
            width = tensor.shape[1]
            columns = torch.linspace(0, width - 1, min(width, COLUMNS)).round().long()
        held = None if module is None else _held(module, leaf, tensor, columns)
        if held is None:
            continue
        held = held[first : first + len(tensor)]
        want = tensor if columns is None else tensor[:, columns]
        if held.shape != want.shape:
            continue
        compared += 1
        if not torch.equal(held.cpu(), want.to(held.dtype)):
            differ.append(name)
    return compared, differ


def _module(
    model: nn.Module, path: str, leaf: str, given: Mapping[str, Tensor]
) -> tuple[nn.Module | None, int]:
    """Return the module that holds a tensor, and the tensor's first row there.

    vLLM packs matrices with the same input into one: query, key and value; gate and up.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if path in modules:
        return modules[path], 0
    above, _, part = path.rpartition(".")
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for whole, parts in packed.items():
        module = modules.get(f"{above}.{whole}")
        if part in parts and module is not None:
            before = (given.get(f"{above}.{p}.{leaf}") for p in parts[: parts.index(part)])
            return module, sum(len(tensor) for tensor in before if tensor is not None)
    return None, 0


def _held(module: Any, leaf: str, tensor: Tensor, columns: Tensor | None) -> Tensor | None:
    """Return a module's parameter; of a matrix, some columns.

    On CPUs vLLM keeps only a packed form of a matrix, which is read back by multiplying unit
    vectors.
    """
    held = getattr(module, leaf, None)
    if not isinstance(held, Tensor):
        return None
    is_multiplied = type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear")
    if held.numel() and not is_multiplied:
        is_matrix = columns is not None and held.dim() == 2 and held.shape[1] == tensor.shape[1]
        return held[:, columns] if is_matrix else held
    width = held.shape[1] if held.numel() else getattr(module, "input_size_per_partition", None)
    if columns is None or width != tensor.shape[1] or not hasattr(module, "quant_method"):
        return None
    # Multiplying by ones and zeros is exact, so the results can be compared for equality.
    units = torch.zeros(len(columns), tensor.shape[1], dtype=held.dtype)
    units[torch.arange(len(columns)), columns] = 1
    return module.quant_method.apply(module, units).T
