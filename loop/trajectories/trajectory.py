"""From requests and answers to rows: turns whose tokens continue each other become one row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...store.ids import content_id
from ...store.records import Experience, Message, Task
from ..inference.messages import after, begins, is_begun
from ..inference.policy import (
    Completion,
    Policy,
    PolicyError,
    Sampling,
    Timing,
    Turn,
    default_sampling,
)


class RolloutPolicy:
    """The policy of one rollout: it seeds each request and records every turn.

    The seed is a function of the rollout's id and the number of the request, so that repeating a
    rollout gives the same samples. Sampled tokens are kept unchanged in later turns, and every turn
    can become part of a row, whatever the workflow does with the answers.
    """

    def __init__(
        self, policy: Policy, *, sampling: Sampling, seed: int = 0, rollout: str = ""
    ) -> None:
        self._policy, self.sampling, self._seed = policy, sampling, seed
        self.rollout = rollout
        """The id of the rollout."""
        self._requests = 0
        self.turns: list[Turn] = []
        """The turns so far, in the order of the answers."""
        self.metrics: dict[str, float] = {}
        """Metrics of the rollout, which are stored with its last row."""
        self.ended: str | None = None
        """Why the rollout ended, if not for the last completion's reason."""

    def companion(self, other: Policy, role: str) -> "RolloutPolicy":
        """Return the same rollout's policy for another model, which is seeded by its `role` too."""
        return RolloutPolicy(
            other,
            sampling=default_sampling(other),
            seed=self._seed,
            rollout=f"{self.rollout}/{role}",
        )

    @property
    def version(self) -> int | None:
        """The version that would answer a request sent now; None for an external policy."""
        return self._policy.version

    @property
    def inner(self) -> Policy:
        """The policy that all rollouts share; requests to it are not recorded here."""
        return self._policy

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        tools: Sequence[dict[str, Any]] | None = None,
        sampling: Sampling | None = None,
        earlier: Sequence[Turn] = (),
    ) -> list[Completion]:
        """Pass the request on with its seed and what was sampled before."""
        self.ended = None  # the rollout continues after an earlier `finish`
        chosen = self.seeded(sampling)
        asked = list(messages)  # a copy: workflows go on to append to their list
        answers = await self._policy.generate(
            asked, n=n, tools=tools, sampling=chosen, earlier=[*self.turns, *earlier]
        )
        answers = [one if one.sampling else replace(one, sampling=chosen) for one in answers]
        self.turns += [Turn(messages=asked, completion=one, tools=tools) for one in answers]
        return answers

    def seeded(self, sampling: Sampling | None = None) -> Sampling:
        """Return the sampling of the next request, with its seed."""
        # by the rollout's id: a rollout that is repeated after a kill gives the same samples
        seed = int(content_id(self._seed, self.rollout, self._requests, length=12), 16)
        self._requests += 1  # before awaiting, so that concurrent requests differ in their seeds
        return (sampling or self.sampling).updated(seed=seed)

    def finalize(self, rows: Sequence[Experience]) -> list[Experience]:
        """Return a rollout's rows, the last with its metrics and why the rollout ended."""
        if not rows:
            return []
        *before, last = with_tokenizer(rows, self.turns)
        reason = self.ended or last.finish_reason
        metrics = {**last.metrics, **self.metrics}
        return [*before, last.updated(metrics=metrics, finish_reason=reason)]


def with_tokenizer(rows: Sequence[Experience], turns: Sequence[Turn]) -> list[Experience]:
    """Return rows with the tokenizer of the turns, if all turns have the same one."""
    [name, *others] = {turn.completion.tokenizer for turn in turns} or {None}
    if name is None or others:
        return list(rows)
    return [
        row.updated(tokenizer=name) if row.token_ids is not None and not row.tokenizer else row
        for row in rows
    ]


def record_metric(policy: Policy, name: str, value: float = 1.0) -> None:
    """Add to a metric of the policy's rollout; do nothing for a policy without one."""
    if isinstance(policy, RolloutPolicy):
        policy.metrics[name] = policy.metrics.get(name, 0.0) + value


@dataclass
class TrajectoryBuilder:
    """Builds a row from turns that continue each other."""

    turns: list[Turn] = field(default_factory=list)
    token_ids: list[int] | None = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    routed_experts: list[Sequence[int]] | None = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)

    def fits(self, turn: Turn) -> int | None:
        """Return how many tokens (or messages) of this row a turn continues, or None."""
        last, completion = self.turns[-1], turn.completion
        if (turn.tools or None) != (last.tools or None):
            return None
        if self.token_ids is None or completion.token_ids is None or completion.prompt_ids is None:
            both_text = self.token_ids is None and completion.token_ids is None
            return len(last.messages) + 1 if both_text and begins(last, turn.messages) else None
        if _columns(completion) != _columns(last.completion):
            return None  # all log-probs of a row are at one temperature
        size = len(self.token_ids)
        return size if list(completion.prompt_ids[:size]) == self.token_ids else None

    def add(self, turn: Turn) -> None:
        """Append a turn that fits."""
        completion = turn.completion
        self.turns.append(turn)
        if completion.token_ids is None or completion.prompt_ids is None:
            self.token_ids = self.logprobs = None
            return
        assert self.token_ids is not None, "a turn with tokens fits rows with tokens only"
        message = completion.prompt_ids[len(self.token_ids) :]
        self.token_ids += [*message, *completion.token_ids]
        self.loss_mask += [False] * len(message) + [True] * len(completion.token_ids)
        if completion.logprobs is None:
            self.logprobs = None
        elif self.logprobs is not None:
            self.logprobs += [0.0] * len(message) + list(completion.logprobs)
        if completion.routed_experts is None:
            self.routed_experts = None
        elif self.routed_experts is not None:
            # those of earlier turns stay, by which their answers were sampled
            self.routed_experts += completion.routed_experts[len(self.routed_experts) :]
        for segment in completion.segments:
            self._segment(vars(segment))

    def _segment(self, new: dict[str, Any]) -> None:
        last = self.segments[-1] if self.segments else None
        if last and all(last[k] == new[k] for k in ("policy_version", "digest")):
            last["num_tokens"] += new["num_tokens"]
        elif new["num_tokens"]:
            # A copy: `num_tokens` grows above, and `new` is the completion's own segment.
            self.segments.append(dict(new))

    def experience(self, task: Task) -> Experience:
        """Return the row of the turns so far."""
        first, last = self.turns[0].completion, self.turns[-1].completion
        tokens: dict[str, Any] = {}
        if self.token_ids is not None and first.prompt_ids is not None:
            tokens = {
                "token_ids": self.token_ids,
                "loss_mask": self.loss_mask,
                "logprobs": self.logprobs,
                # no router has read the last token
                "routed_experts": self.routed_experts and [*self.routed_experts, ()],
                "prompt_length": len(first.prompt_ids),
                "tokenizer": first.tokenizer,
            }
        segments = [{k: s[k] for k in ("policy_version", "num_tokens")} for s in self.segments]
        digests = [s["digest"] for s in self.segments]
        messages, response = after(self.turns[-1]), last.text
        if is_begun(self.turns[-1].messages):
            response = str(messages[-1].get("content") or "")
        return Experience(
            task_id=task.task_id,
            messages=messages,
            tools=self.turns[-1].tools,
            prompt_text=_last_asked(self.turns[0].messages) or task.prompt_text,
            response_text=response,
            finish_reason=last.finish_reason,
            policy_version=first.policy_version,
            segments=segments or None,
            digests=digests if any(digests) else None,
            engine=first.engine,
            timings=_seconds([turn.completion.timing for turn in self.turns]),
            num_turns=len({len(after(turn)) for turn in self.turns}),
            **self._sampled_so(),
            **tokens,
        )

    def _sampled_so(self) -> dict[str, Any]:
        """Return the sampling settings that all turns share; in rows of text they may differ."""
        first, *others = (_columns(turn.completion) for turn in self.turns)
        return {name: v for name, v in first.items() if all(o.get(name) == v for o in others)}


def to_experiences(task: Task, turns: Sequence[Turn]) -> list[Experience]:
    """Return turns as rows: turns whose tokens continue each other share a row.

    Only the sampled tokens of a row are trained on; the tokens between them have a mask of false
    and a log-prob of 0. A turn whose prompt does not continue a row token for token begins another
    row, since nothing is tokenized again. So does a turn that was sampled with another temperature,
    settings. Rows are in the order in which they end.
    """
    return [row.experience(task) for row in _joined(turns)]


class Answers:
    """Makes rows of several answers to a task's messages, one row each.

    They are those of `to_experiences`, where a copy of the first row with an answer's own columns
    takes a fifth of the time. The answers may differ in seed and temperature only.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._first: tuple[Experience, Completion] | None = None

    def row(self, one: Completion) -> Experience:
        """Return the row of an answer."""
        messages = list(self._task.messages)
        if self._first and (row := _copied(*self._first, messages, one)) is not None:
            return row
        [row] = to_experiences(self._task, [Turn(messages=messages, completion=one)])
        self._first = self._first or (row, one)
        return row


def _copied(
    row: Experience, first: Completion, messages: list[Message], one: Completion
) -> Experience | None:
    """Return the row of another answer to the same prompt; None if more than tokens differ."""
    is_alike = (
        one.prompt_ids is first.prompt_ids
        and one.sampling is not None
        and first.sampling is not None
        and one.sampling.temperature == first.sampling.temperature
    )
    tokens, logprobs = one.token_ids, one.logprobs
    if not is_alike or one.prompt_ids is None or tokens is None or logprobs is None:
        return None
    if not tokens or one.routed_experts is not None or is_begun(messages):
        return None
    prompt = len(one.prompt_ids)
    digests = [s.digest for s in one.segments]
    return row.updated(
        token_ids=[*one.prompt_ids, *tokens],
        loss_mask=[False] * prompt + [True] * len(tokens),
        logprobs=[0.0] * prompt + list(logprobs),
        segments=[
            {"policy_version": s.policy_version, "num_tokens": s.num_tokens} for s in one.segments
        ],
        digests=digests if any(digests) else None,
        # of its own, since rewards may write into them
        sampling=row.sampling and dict(row.sampling),
        metrics={},
        rewards={},
        messages=[*messages, one.answer],
        response_text=one.text,
        finish_reason=one.finish_reason,
        policy_version=one.policy_version,
        timings=_seconds([one.timing]),
    )


def no_answer(task: Task, version: int | None) -> Experience:
    """Return the row of a rollout in which nothing was sampled."""
    return Experience(
        task_id=task.task_id,
        messages=list(task.messages),
        prompt_text=task.prompt_text,
        policy_version=version,
        num_turns=0,
    )


def split_trajectories(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Return the turns of each row that `to_experiences` makes."""
    return [row.turns for row in _joined(turns)]


def _joined(turns: Sequence[Turn]) -> list[TrajectoryBuilder]:
    made: list[TrajectoryBuilder] = []
    for turn in turns:
        fitting = [(size, i) for i, row in enumerate(made) if (size := row.fits(turn)) is not None]
        # The longest match wins. Its row moves to the end, which keeps rows in the order of their
        # ends: the last row carries the rollout's metrics and reward.
        row = made.pop(max(fitting)[1]) if fitting else TrajectoryBuilder()
        row.add(turn)
        made.append(row)
    return made


def _columns(completion: Completion) -> Mapping[str, Any]:
    return completion.sampling.columns if completion.sampling else {}


def _last_asked(messages: Sequence[Message]) -> str | None:
    """Return the last user message, if it is text."""
    said = [m.get("content") for m in messages if m.get("role") == "user"]
    return said[-1] if said and isinstance(said[-1], str) else None


def _seconds(times: Sequence[Timing]) -> Mapping[str, float]:
    if not any(time.total for time in times):
        return {}
    return {
        "queued": sum(t.queued for t in times),
        "first_token": times[0].first_token,
        "total": sum(t.total for t in times),
    }


def finish_reason(error: BaseException) -> str:
    """Return the finish reason of a rollout that ended with an error."""
    return error.finish_reason if isinstance(error, PolicyError) else "error"
