"""Methods that rlake adds to vLLM's workers: load weights, and verify what the model holds.

vLLM mixes the class into its own workers (`worker_extension_cls`), in the processes that hold the
weights; rlake's own process never imports this module.
"""

import json
import os
import select
import signal
import socket
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from ...models.state_dict import weights_digest
from ..shared_tensors import opened
from .comparison import differences
from .logprobs import keep_full_logprobs
from .worker_adapter import adapter_differences, put_adapter


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

    def take_in(self, weights: str) -> dict[str, Any]:
        """Load tensors if they have the expected digest, and compare what the model then holds.

        `weights` is JSON: the `name` for messages; the `source` of the tensors, for `opened`; the
        `digest`, or null to check neither; the settings of an `adapter`, null for a whole model.
        The digest is computed from the tensors that are loaded, so nothing can change in between.
        Returns either `refused`, the reason why nothing changed, or the number of tensors `given`,
        the number `compared` with what the model multiplies with, and the names that `differ`.
        """
        asked = json.loads(weights)
        try:
            given = opened(asked["source"])
        except (OSError, RuntimeError, SafetensorError) as error:
            return {"refused": f"{asked['name']} cannot be read: {error}"}
        if asked["digest"] is not None and (found := weights_digest(given)) != asked["digest"]:
            return {"refused": f"{asked['name']} has digest {found}, expected {asked['digest']}"}
        model = self.model_runner.get_model()
        if asked["adapter"] is not None:
            manager = self.model_runner.lora_manager
            if (reason := put_adapter(manager, given, asked["adapter"])) is not None:
                return {"refused": reason}
            compare = partial(adapter_differences, manager, asked["adapter"])
        else:
            given = _named(given, model)
            self.model_runner.reload_weights(weights_iterator=iter(given.items()))
            if (mapper := getattr(model, "hf_to_vllm_mapper", None)) is not None:
                # vLLM has names of its own for the parts of some models
                given = mapper.get_rename_mapper().apply_dict(given)
            if (tied := _tied_head(model)) is not None:
                head, embedding = tied
                given[head] = given[embedding]
            compare = partial(differences, model)
        compared, differ = (0, []) if asked["digest"] is None else compare(given)
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


def _tied_head(model: nn.Module) -> tuple[str, str] | None:
    """Tie the head to the reloaded embedding; return both names, or None if it is not tied.

    A reload replaces the embedding's tensor; the head's, and its packed form for a CPU's kernel,
    would stay the old ones.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    place = next((n for n in modules if n.rpartition(".")[2] == "lm_head"), "lm_head")
    head: Any = modules.get(place)
    name = next((n for n in modules if n.endswith("embed_tokens")), None)
    config = getattr(model, "config", None)
    if head is None or name is None or not getattr(config, "tie_word_embeddings", False):
        return None
    head, embedding = (getattr(one, "base_layer", one) for one in (head, modules[name]))
    if not isinstance(getattr(head, "weight", None), Tensor):
        return None
    head.weight = embedding.weight
    head.quant_method.process_weights_after_loading(head)
    return f"{place}.weight", f"{name}.weight"
