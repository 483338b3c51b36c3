"""Reward models: a trained sequence classifier that scores rollouts without a reference answer."""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from ...store.errors import OperatorError
from ...store.records import Experience, Task
from ..reward_protocol import Verdict
from ..source_digest import identified_by
from .classifier import (
    Encoding,
    Reads,
    check_label,
    config_of,
    load,
    located,
    micro_batches,
    value_of,
)


def _identity(**parameters: Any) -> dict[str, Any]:
    """Return the parameters with the digest of the model's files in place of its path."""
    path = _path(**parameters)
    folder, digest = located(path)
    check_label(config_of(folder, path), path, parameters.get("label"))
    return parameters | {"path": None, "digest": digest}


def _path(
    *, path: str | None = None, run: str | None = None, digest: str | None = None, **_: Any
) -> str:
    """Return the path of a model; it and the digest are filled in where `run` is known."""
    if path is None:
        got = f"run `{run}`, which is known in a run and in `rlake rescore`" if run else "none"
        raise OperatorError(
            f"the reward `reward_model` needs `path`, got {got}; name a model's folder, such as "
            "that of `rlake export model RUN --out FOLDER`"
        )
    if run is not None and digest is None:
        raise OperatorError("the reward `reward_model` has both `path` and `run`; leave one out")
    return path


@identified_by(_identity)
async def reward_model(
    task: Task,
    experience: Experience,
    *,
    path: str | None = None,
    run: str | None = None,
    version: int | None = None,
    digest: str | None = None,
    label: str | None = None,
    reads: Reads | None = None,
    device: str = "auto",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    micro_batch_tokens: Annotated[int, Field(ge=1)] = 16_384,
) -> Verdict:
    """Return the score of a sequence classifier of transformers, such as a reward model.

    `path` is its folder or hub name. In a run and in `rlake rescore`, `run` names instead a run of
    the store that trained it with `algorithm: reward_model`, with `version` (the newest one, which
    is recorded) and `digest` of its weights. A model with one label returns its output; of several,
    `label` is the one whose probability (output, if it was trained by regression) is the reward.
    `reads` is what the model gets: `messages`, through its chat template; the prompt and response
    as a `pair` of texts; the `response` alone; or the rollout's `token_ids` up to the last trained
    one, as our trainer does, which is the default with `run` and needs the same tokenizer. There is
    no reward for a rollout without it, or longer than the model takes. Rollouts that wait together
    are scored together, in passes of at most `micro_batch_tokens` with padding. The version of this
    reward includes a digest of the model's files.

    Raises OperatorError for a folder without such a model, several labels of which none is chosen,
    and tokens of another tokenizer.

    >>> task, experience = Task.ask("2+2="), Experience(task_id="t", response_text="4")
    >>> asyncio.run(reward_model(task, experience))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    rlake.store.errors.OperatorError: the reward `reward_model` needs `path`, got none; ...
    """
    del task, version
    path = _path(path=path, run=run, digest=digest)
    reads = reads or ("token_ids" if run else "messages")
    request = _Request(experience, (path, label, reads, device, dtype, micro_batch_tokens))
    _WAITING.append(request)
    _PASSES.submit(_score_waiting)
    return await asyncio.wrap_future(request.verdict)


@dataclass
class _Request:
    experience: Experience
    settings: tuple[str, str | None, Reads, str, str, int]
    verdict: "Future[Verdict]" = field(default_factory=Future)


_WAITING: deque[_Request] = deque()
_PASSES = ThreadPoolExecutor(1, "reward-model")
"""One pass at a time, since passes would share the cores or the GPU's memory."""


def _score_waiting() -> None:
    """Score all rollouts that wait; later calls find those that came meanwhile."""
    taken: dict[Any, list[_Request]] = {}
    while _WAITING:
        request = _WAITING.popleft()
        if request.verdict.set_running_or_notify_cancel():
            taken.setdefault(request.settings, []).append(request)
    for settings, requests in taken.items():
        try:
            _score(requests, *settings)
        except Exception as error:  # noqa: BLE001 - raised again where the verdicts are awaited
            for request in requests:
                if not request.verdict.done():
                    request.verdict.set_exception(error)


def _score(
    requests: Sequence[_Request],
    path: str,
    label: str | None,
    reads: Reads,
    device: str,
    dtype: str,
    micro_batch_tokens: int,
) -> None:
    classifier = load(*located(path), path, device, dtype)
    check_label(classifier.model.config, path, label)
    ready: list[tuple[_Request, Encoding]] = []
    for request in requests:
        try:
            encoding = classifier.encode(request.experience, reads)
        except OperatorError as error:
            request.verdict.set_exception(error)
            continue
        reason = classifier.refuses(len(encoding.get("input_ids", ())))
        if reason is None:
            ready.append((request, encoding))
        else:
            request.verdict.set_result(Verdict(None, reason))
    for indices in micro_batches([len(e["input_ids"]) for _, e in ready], micro_batch_tokens):
        logits = classifier.logits([ready[i][1] for i in indices])
        for i, outputs in zip(indices, logits, strict=True):
            ready[i][0].verdict.set_result(
                Verdict(value_of(classifier.model.config, outputs, label))
            )
