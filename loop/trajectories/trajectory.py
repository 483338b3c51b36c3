"""From requests and answers to rows: turns whose tokens continue each other become one row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...store.ids import content_id
from ...store.records import Experience, Message, Task
from ..inference.messages import after, begins, is_begun
from ..inference.policy import Completion, Policy, PolicyError, Sampling, Turn


class RolloutPolicy:
    """The policy as one try sees it: its requests have seeds of their own, and are remembered.

    The seed is a function of the try's id and the number of the request, so that a try that is
    made again is the same. What was sampled stays token for token in later turns, and all turns
    can be made rows of, whatever the workflow does with the answers.
    """

    def __init__(
        self, policy: Policy, *, sampling: Sampling, seed: int = 0, rollout: str = ""
    ) -> None:
        self._policy, self.sampling, self._seed = policy, sampling, seed
        self.rollout = rollout
        """The id of the try."""
        self._requests = 0
        self.turns: list[Turn] = []
        """What was asked and answered so far, in the order of the answers."""
        self.metrics: dict[str, float] = {}
        """Measurements of the try, which its last row has."""
        self.ended: str | None = None
        """Why the try ended, where that is no completion's reason: its last row's."""

    @property
    def version(self) -> int | None:
        """The version that a request sent now is answered with; None: none of ours."""
        return self._policy.version

    @property
    def inner(self) -> Policy:
        """The policy that all tries share; what is asked of it is no turn of this one."""
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
        seed = int(content_id(self._seed, self.rollout, self._requests, length=12), 16)
        self._requests += 1
        self.ended = None  # not yet, as it goes on
        chosen = replace(sampling or self.sampling, seed=seed)
        asked = list(messages)
        answers = await self._policy.generate(
            asked, n=n, tools=tools, sampling=chosen, earlier=[*self.turns, *earlier]
        )
        answers = [one if one.sampling else replace(one, sampling=chosen) for one in answers]
        self.turns += [Turn(messages=asked, completion=one, tools=tools) for one in answers]
        return answers

    def finalize(self, rows: Sequence[Experience]) -> list[Experience]:
        """Return a try's rows, the last with what was measured and why the try ended."""
        if not rows:
            return []
        rows = with_tokenizer(rows, self.turns)
        last = replace(rows[-1], metrics={**rows[-1].metrics, **self.metrics})
        return [*rows[:-1], replace(last, finish_reason=self.ended or last.finish_reason)]


def with_tokenizer(rows: Sequence[Experience], turns: Sequence[Turn]) -> list[Experience]:
    """Return rows that say of which tokenizer their tokens are: that of the turns."""
    [name, *others] = {turn.completion.tokenizer for turn in turns} or {None}
    if name is None or others:
        return list(rows)
    return [
        replace(row, tokenizer=name) if row.token_ids is not None and not row.tokenizer else row
        for row in rows
    ]


def record_metric(policy: Policy, name: str, value: float = 1.0) -> None:
    """Add to a measurement of the try that a policy is given to; elsewhere nothing is noted."""
    if isinstance(policy, RolloutPolicy):
        policy.metrics[name] = policy.metrics.get(name, 0.0) + value


@dataclass
class TrajectoryBuilder:
    """A row in the making."""

    turns: list[Turn] = field(default_factory=list)
    token_ids: list[int] | None = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)

    def fits(self, turn: Turn) -> int | None:
        """Return how many tokens (or messages) of this row a turn continues; None: none."""
        last, completion = self.turns[-1], turn.completion
        if (turn.tools or None) != (last.tools or None):
            return None
        if self.token_ids is None or completion.token_ids is None or completion.prompt_ids is None:
            both_text = self.token_ids is None and completion.token_ids is None
            return len(last.messages) + 1 if both_text and begins(last, turn.messages) else None
        if _columns(completion) != _columns(last.completion):
            return None  # log-probs of a row are at one temperature
        size = len(self.token_ids)
        return size if list(completion.prompt_ids[:size]) == self.token_ids else None

    def add(self, turn: Turn) -> None:
        """Write a turn on, which fits."""
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
        for segment in completion.segments:
            self._segment(vars(segment))

    def _segment(self, new: dict[str, Any]) -> None:
        last = self.segments[-1] if self.segments else None
        if last and all(last[k] == new[k] for k in ("policy_version", "digest")):
            last["num_tokens"] += new["num_tokens"]
        elif new["num_tokens"]:
            self.segments.append(dict(new))

    def experience(self, task: Task) -> Experience:
        """Return the row of what was taken in."""
        first, last = self.turns[0].completion, self.turns[-1].completion
        tokens: dict[str, Any] = {}
        if self.token_ids is not None and first.prompt_ids is not None:
            tokens = {
                "token_ids": self.token_ids,
                "loss_mask": self.loss_mask,
                "logprobs": self.logprobs,
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
            timings=_seconds(self.turns),
            num_turns=len({len(after(turn)) for turn in self.turns}),
            **self._sampled_so(),
            **tokens,
        )

    def _sampled_so(self) -> dict[str, Any]:
        """Return the settings that all turns were sampled with; of text they may differ."""
        first, *others = (_columns(turn.completion) for turn in self.turns)
        return {name: v for name, v in first.items() if all(o.get(name) == v for o in others)}


def to_experiences(task: Task, turns: Sequence[Turn]) -> list[Experience]:
    """Return the rows that turns are: one for each run of turns whose tokens continue each other.

    In a row the sampled tokens, and only they, are trained on; what was told between them has a
    mask of false and a log-prob of 0. A turn whose prompt is not, token for token, what a row has
    so far begins another row: nothing is tokenised again. So does a turn that was sampled with
    another temperature, top_p, top_k or min_p. Rows come in the order in which they end.
    """
    return [row.experience(task) for row in _joined(turns)]


def split_trajectories(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Return the turns that each row of `rows_of` is made of."""
    return [row.turns for row in _joined(turns)]


def _joined(turns: Sequence[Turn]) -> list[TrajectoryBuilder]:
    made: list[TrajectoryBuilder] = []
    for turn in turns:
        fitting = [(size, i) for i, row in enumerate(made) if (size := row.fits(turn)) is not None]
        row = made.pop(max(fitting)[1]) if fitting else TrajectoryBuilder()
        row.add(turn)
        made.append(row)
    return made


def _columns(completion: Completion) -> Mapping[str, float | int | None]:
    """Return the settings that a completion was sampled with, where they are known."""
    return completion.sampling.columns if completion.sampling else {}


def _last_asked(messages: Sequence[Message]) -> str | None:
    """Return what the user said last, where it is text."""
    said = [m.get("content") for m in messages if m.get("role") == "user"]
    return said[-1] if said and isinstance(said[-1], str) else None


def _seconds(turns: Sequence[Turn]) -> Mapping[str, float]:
    """Return the timing of a row's requests, where the engine says it."""
    times = [turn.completion.timing for turn in turns]
    if not any(time.total for time in times):
        return {}
    return {
        "queued": sum(t.queued for t in times),
        "first_token": times[0].first_token,
        "total": sum(t.total for t in times),
    }


def finish_reason(error: BaseException) -> str:
    """Return the finish reason of a try that ended with an error."""
    return error.finish_reason if isinstance(error, PolicyError) else "error"
