"""What is sent to SGLang for a request, and how its answer is read."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from time import perf_counter
from typing import Any

from ..engine import Request, Sampled
from ..policy import PROCESSING, PolicyError, Sampling, Segment, Timing
from ..token_stream import TokenCallback

NONSENSE = -1e30
"""SGLang writes log-probs below this for minus infinity."""
_SEEDS = 2**31
_REASONS = ("stop", "length", "abort")


def body_of(request: Request, rid: str) -> dict[str, Any]:
    """Return the body of a request. Raises PolicyError for settings that SGLang cannot do."""
    sampling = request.sampling
    if (why := _refused(sampling, request.grammar)) is not None:
        raise PolicyError(why, finish_reason="invalid_request")
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "stop": list(sampling.stop),
        "no_stop_trim": True,
        "ignore_eos": sampling.ignore_eos,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        # SGLang uses it with `--enable-deterministic-inference`, and ignores it otherwise.
        "sampling_seed": sampling.seed % _SEEDS,
    }
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if request.grammar is not None:
        params["structural_tag"] = request.grammar
    return {
        "rid": rid,
        "input_ids": list(request.prompt_ids),
        "sampling_params": params,
        "return_logprob": True,
        "top_logprobs_num": sampling.top_logprobs,
    }


class Answer:
    """The answer to one request; it begins anew if its weights changed where they must not."""

    def __init__(self, request: Request) -> None:
        self.request = request
        sampling = request.sampling
        self.needs_scores = request.grammar is not None or sampling.is_processed
        """Whether SGLang's log-probs are of another distribution than the model's."""
        self.is_begun = False
        """Whether tokens were passed on."""
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[list[tuple[int, float]]] = []
        self._labels: list[tuple[str, int]] = []
        self._reason = "abort"
        self._began = perf_counter()
        self._first_token = 0.0

    @property
    def on_tokens(self) -> TokenCallback | None:
        """The callback for the tokens; None where the answer may begin anew."""
        if self.request.on_tokens is None or self.needs_scores:
            return None
        return self._pass_on

    def _pass_on(self, token_ids: Sequence[int]) -> None:
        assert self.request.on_tokens is not None
        if not self.is_begun:
            self._first_token = perf_counter() - self._began
        self.is_begun = True
        self.request.on_tokens(token_ids)

    def read(self, found: Mapping[str, Any], server: str) -> None:
        """Read what a server answered. Raises PolicyError if it is invalid."""
        try:
            meta = found["meta_info"]
            self.token_ids = [int(token) for token in found["output_ids"]]
            pairs = meta.get("output_token_logprobs") or []
            self._logprobs = [float(logprob) for logprob, *_ in pairs]
            self._top = _top_of(meta.get("output_top_logprobs") or [])
            self._reason = str(meta["finish_reason"]["type"])
            spans = meta.get("weight_versions") or []
            self._labels = [
                (str(span["version"]), int(span["end"]) - int(span["start"])) for span in spans
            ]
            is_same = [int(token) for _, token, *_ in pairs] == self.token_ids
        except (LookupError, TypeError, ValueError) as error:
            raise PolicyError(
                f"the server `{server}` gave an invalid answer: {error!r}; is it SGLang 0.5.23 or "
                "newer?"
            ) from error
        if not is_same or not all(map(is_sane, self._logprobs)):
            odd = [one for one in self._logprobs if not is_sane(one)][:1]
            raise PolicyError(
                f"the server `{server}` gave an invalid answer: {len(self.token_ids)} tokens, "
                f"{len(self._logprobs)} log-probs {odd or ''}"
            )
        if sum(number for _, number in self._labels) != len(self.token_ids):
            raise PolicyError(
                f"the server `{server}` does not say which weights sampled each token "
                "(`weight_versions`); update it, rlake is tested with SGLang 0.5.23"
            )

    def is_of(self, labels: Collection[str], server: str) -> bool:
        """Return whether all tokens are of weights with these labels; False after a restart.

        Raises PolicyError if the server has weights of another job.
        """
        return all(is_ours(label, labels, server) for label, _ in self._labels)

    def take_scores(self, scores: "Scores") -> bool:
        """Take the model's log-probs, unless they are of other weights than the answer."""
        if {one for one, number in self._labels if number} != {scores.label}:
            return False
        self._logprobs, self._top = list(scores.logprobs), list(scores.top)
        return True

    def begin_anew(self, server: str) -> None:
        """Drop the tokens. Raises PolicyError if some were passed on."""
        if self.is_begun:
            raise PolicyError(
                f"the server `{server}` lost its weights in the midst of an answer that was "
                "streamed; ask again"
            )
        self.token_ids, self._logprobs, self._top, self._labels = [], [], [], []

    def sampled(self) -> Sampled:
        """Return the whole answer."""
        segments = [_segment(label, number) for label, number in self._labels if number]
        return Sampled(
            token_ids=self.token_ids,
            logprobs=self._logprobs,
            top_logprobs=self._top if self.request.sampling.top_logprobs else None,
            finish_reason=self._reason if self._reason in _REASONS else "stop",
            segments=[one for one in segments if one is not None],
            timing=Timing(first_token=self._first_token, total=perf_counter() - self._began),
        )

    def aborted(self) -> Sampled:
        """Return an answer that ended before a server had it."""
        self._reason = "abort"
        return self.sampled()


@dataclass(frozen=True)
class Scores:
    """The model's log-probs of given tokens."""

    logprobs: Sequence[float]
    top: Sequence[list[tuple[int, float]]]
    label: str
    """The label of the weights."""


def scores_of(found: Mapping[str, Any], token_ids: Sequence[int], server: str) -> Scores:
    """Return the log-probs of the given tokens.

    Raises PolicyError if the answer is not about these tokens.
    """
    try:
        meta = found["meta_info"]
        pairs = meta["input_token_logprobs"][-len(token_ids) :]
        # Not their tokens: SGLang reports the vocabulary's last one as 0.
        scores = [float(logprob) for logprob, *_ in pairs]
        top = _top_of((meta.get("input_top_logprobs") or [])[-len(token_ids) :])
        label = str(meta["weight_version"])
    except (LookupError, TypeError, ValueError) as error:
        raise PolicyError(f"the server `{server}` gave an invalid answer: {error!r}") from error
    if len(scores) != len(token_ids) or not all(map(is_sane, scores)):
        raise PolicyError(
            f"the server `{server}` scored {len(scores)} of {len(token_ids)} tokens: {scores[:3]}"
        )
    return Scores(scores, top, label)


def is_ours(label: str, labels: Collection[str], server: str) -> bool:
    """Return whether weights are of these labels; False after a restart of the server.

    Raises PolicyError if they are another job's.
    """
    if _segment(label, 1) is None:  # the server's own word for what it was started with
        return False
    if label not in labels:
        raise PolicyError(
            f"the server `{server}` has weights of another job ({label}); give each job servers "
            "of its own"
        )
    return True


def _top_of(places: Sequence[Any]) -> list[list[tuple[int, float]]]:
    return [[(int(token), float(value)) for value, token, *_ in place or ()] for place in places]


def is_sane(logprob: float) -> bool:
    """Return whether a log-prob is a finite number and not SGLang's minus infinity."""
    return isfinite(logprob) and logprob > NONSENSE


def _refused(sampling: Sampling, grammar: str | None) -> str | None:
    processed = [name for name in PROCESSING if name in sampling.others]
    if (processed or grammar) and sampling.temperature not in (0, 1):
        what = f"`{processed[0]}`" if processed else "a grammar"
        return (
            f"{what} changes the distribution of which SGLang reports log-probs, and the model's "
            f"own are known at temperature 1 only, not {sampling.temperature:g}; set it to 1 or "
            "0, or take another engine"
        )
    if sampling.stop and sampling.min_tokens:
        return (
            "SGLang ends an answer at a stop text before `min_tokens` too; leave one of `stop` and "
            "`min_tokens` out, or take another engine"
        )
    return None


def _segment(label: str, number: int) -> Segment | None:
    """Return the segment of a label; None if an engine did not write it."""
    try:
        version, digest, _ = json.loads(label)
    except (TypeError, ValueError):
        return None
    return Segment(policy_version=version, num_tokens=number, digest=digest)
