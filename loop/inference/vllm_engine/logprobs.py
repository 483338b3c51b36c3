"""Log-probs of vLLM's samplers: of the full distribution, even if sampling truncates it.

With `processed_logprobs` vLLM returns log-probs after temperature, but also after penalties,
biases, min_p, top_k and top_p, and no mode has the temperature alone. So its sampler is patched to
return that, in batches where some request sets one of these. It costs one copy of the logits.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def keep_full_logprobs(sampler: Any, grammars: Any = None) -> bool:
    """Make a sampler of vLLM return log-probs of the full distribution; False if it is unknown.

    `grammars` is what masks logits by grammars in model runner V2.
    """
    if hasattr(sampler, "topk_topp_sampler"):
        sampler.sample = _of_runner_1(sampler)
    elif hasattr(sampler, "sampling_states"):
        sampler.sample = _of_runner_2(sampler, grammars)
    return "sample" in vars(sampler)


def _of_runner_1(sampler: Any) -> Any:
    """Return `sample` for the sampler of vLLM's model runner V1, as on CPUs."""
    original, process = sampler.sample, sampler.apply_logits_processors
    before: list[Tensor] = []

    def processed(logits: Tensor, metadata: Any, *rest: Any, **options: Any) -> Any:
        if not before and _changes(metadata):
            before[:] = [logits.clone()]
        return process(logits, metadata, *rest, **options)

    def sample(logits: Tensor, metadata: Any, *rest: Any, **options: Any) -> Any:
        cuts = metadata.top_k is not None or metadata.top_p is not None
        if not cuts:
            invariant = metadata.logitsprocs.argmax_invariant  # min_p is one of these
            cuts = any(getattr(processor, "min_p_count", 1) for processor in invariant)
        if not before and (metadata.all_greedy or not cuts):
            return original(logits, metadata, *rest, **options)
        full = before.pop() if before else logits.clone()
        if metadata.temperature is not None:  # None where all are greedy
            full = sampler.apply_temperature(full, metadata.temperature, metadata.all_random)
        sampled, logprobs = original(logits, metadata, *rest, **options)
        is_wanted = logprobs is not None and sampler.logprobs_mode == "processed_logprobs"
        return sampled, sampler.compute_logprobs(full) if is_wanted else logprobs

    sampler.apply_logits_processors = processed
    _keep_unmasked(before)
    return sample


def _keep_unmasked(before: list[Tensor]) -> None:
    """Keep the logits that a grammar is about to mask."""
    from vllm.v1.worker import gpu_model_runner  # pyright: ignore[reportMissingImports]

    runner: Any = gpu_model_runner
    mask = runner.apply_grammar_bitmask

    def masked(scheduled: Any, grammar: Any, batch: Any, logits: Tensor) -> None:
        before[:] = [logits.to(torch.float32, copy=True)]
        mask(scheduled, grammar, batch, logits)

    runner.apply_grammar_bitmask = masked


def _changes(metadata: Any) -> bool:
    """Return whether a batch has penalties, biases or least lengths."""
    return not metadata.no_penalties or any(
        getattr(processor, "biases", ()) or getattr(processor, "min_toks", ())
        for processor in metadata.logitsprocs.non_argmax_invariant
    )


def _of_runner_2(sampler: Any, grammars: Any) -> Any:
    """Return `sample` for the sampler of vLLM's model runner V2, the default on GPUs."""
    original = sampler.sample
    before: list[Tensor] = []
    if grammars is not None:
        mask = grammars.apply_grammar_bitmask

        def masked(logits: Tensor, *rest: Any) -> None:
            before[:] = [logits.to(torch.float32, copy=True)]
            mask(logits, *rest)

        grammars.apply_grammar_bitmask = masked

    def sample(
        logits: Tensor, expanded: Tensor, rows: Tensor, rows_np: Any, *rest: Any, **options: Any
    ) -> Any:
        states = sampler.sampling_states
        cuts = (
            np.any(states.top_k.np[rows_np] != states.vocab_size)
            or np.any(states.top_p.np[rows_np] != 1.0)
            or np.any(states.min_p.np[rows_np] != 0.0)
            or any(_is_used(one, rows_np) for one in sampler.logits_processors)
        )
        is_wanted = sampler.logprobs_mode == "processed_logprobs"
        unmasked = before.pop() if before else None
        is_changed = cuts or unmasked is not None
        if not is_changed or not is_wanted or sampler.return_sampling_mask:
            return original(logits, expanded, rows, rows_np, *rest, **options)
        full = logits.to(torch.float32, copy=True) if unmasked is None else unmasked
        states.apply_temperature(full, expanded, rows_np)
        sampled, _ = original(logits, expanded, rows, rows_np, *rest, **options)
        return sampled, full  # whose log-softmax vLLM takes

    return sample


def _is_used(processor: Any, rows_np: Any) -> bool:
    """Return whether a logits processor of runner V2 changes any of these requests."""
    for name in ("use_penalty", "use_logit_bias"):
        if hasattr(processor, name):
            return bool(getattr(processor, name)[rows_np].any())
    words = getattr(processor, "num_bad_words", None)
    return words is None or bool((words.np[rows_np] > 0).any())
