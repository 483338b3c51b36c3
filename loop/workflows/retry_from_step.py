"""Retry from the step that failed: R3L (arXiv:2601.03715) in an environment.

After an episode with a low reward, the policy names its first wrong answer and says what to do
instead. A second episode replays the answers before that step and continues from there with the
reflection in its prompt. A long episode is thus not resampled because of one wrong step, and credit
goes to the difference: only the answers from that step on are trained on, in both episodes. The
rows, by `metadata.part`:

- `first`: the first episode; `metadata.step` is the step from which the second one differs
- `reflection`: the policy's reflection on it, in the group `reflections`; its reward is the reward
  of the second episode minus that of the first
- `retry`: the second episode. It is stored after the prompt without the reflection, with the
  log-probs of sampling, as in `reflect_and_retry`, and `metrics` has `is_guided`.

For the replay a new environment is given the same answers, and must show the same observations. If
it shows anything else, the episode is not retried, and `retry/differs` is counted.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from ...store.records import Experience, Message, Task
from ..environments.environment import Environment
from ..environments.episode import EnvironmentSpec, as_messages, beginning, joined, opened
from ..inference.messages import after
from ..inference.policy import Completion, Policy, PolicyError, Turn
from ..trajectories.conversation import Conversation
from ..trajectories.trajectory import record_metric
from .multi_turn import played
from .reflect_and_retry import HINT, hinted, reflection_row, without_hint

_REFLECT = (
    "That came to a reward of {reward}. Your answers are steps 1 to {steps}. Write `step N`, the "
    "first that should have been another one. Then say in a few sentences what went wrong there, "
    "and what to do instead."
)
_STEP = re.compile(r"\bstep\W{0,3}(\d{1,6})\b", re.IGNORECASE)


async def retry_from_step(
    task: Task,
    policy: Policy,
    *,
    environment: EnvironmentSpec,
    max_turns: int = 16,
    enough: float = 1.0,
    keep_hint: bool = False,
    reflect: str = _REFLECT,
    hint: str = HINT,
    at_once: int | None = None,
    close_seconds: float = 10.0,
) -> list[Experience]:
    """Act in an environment as in `multi_turn`; below a reward of `enough`, retry from a step.

    `{reward}` and `{steps}` in `reflect` are replaced by the sum of the steps' rewards and their
    number; `hint` and `keep_hint` are as in `reflect_and_retry`. A reflection that names no step
    means the first one, and is counted as `retry/no_step`. An episode that was cancelled, or has no
    reward from the environment, is not retried. If the chat template rewrites earlier answers, the
    second episode keeps its hint.
    """

    def world() -> AbstractAsyncContextManager[Environment]:
        return opened(environment, policy, at_once=at_once, close_seconds=close_seconds)

    # Each episode closes its environment before the next one opens: nested, `at_once: 1` would
    # make a rollout wait for itself.
    async with world() as begun:
        first = Conversation(task, policy, messages=beginning(task, await begun.reset(task)))
        rewards = await played(begun, first, policy, max_turns=max_turns)
    if not rewards or sum(rewards) >= enough or _is_stopped(first):
        return _rows(first, rewards, part="first")
    steps = str(len(first.turns))
    request = reflect.replace("{reward}", f"{sum(rewards):g}").replace("{steps}", steps)
    looking_back = joined(first.messages, request)
    thought = await _thought(policy, looking_back)
    if thought is None:
        return _rows(first, rewards, part="first")
    step = _named(thought.text, len(first.turns), policy)
    left = first.turns[step - 1]
    second = Conversation(task, policy, messages=hinted(left.messages, hint, thought.text))
    async with world() as again:
        repeated = await _repeated(again, task, first.turns[:step])
        if repeated is None:
            record_metric(policy, "retry/differs")
        else:
            repeated += await _gone_on(again, second, policy, max_turns=max_turns - step + 1)
    if repeated is None or not second.turns:
        return [*_rows(first, rewards, part="first"), reflection_row(looking_back, thought, None)]
    first.turns = first.turns[step - 1 :]  # only now: the replay above needs the earlier turns
    if not keep_hint:
        plain = without_hint(second.turns, left.messages, left.completion.prompt_ids)
        second.turns = plain or second.turns
    rows = _rows(second, repeated, part="retry", step=step)
    return [
        *_rows(first, rewards, part="first", step=step),
        reflection_row(looking_back, thought, sum(repeated) - sum(rewards)),
        *(replace(row, metrics={**row.metrics, "is_guided": 1.0}) for row in rows),
    ]


def _is_stopped(conversation: Conversation) -> bool:
    return "abort" in (conversation.ended, conversation.turns[-1].completion.finish_reason)


def _rows(
    conversation: Conversation, rewards: Sequence[float], **metadata: Any
) -> list[Experience]:
    """Return an episode's rows, each with the sum of its rewards."""
    rows = [replace(row, metadata=metadata) for row in conversation.rows()]
    if not rewards:
        return rows
    return [row.with_reward({"environment": sum(rewards)}) for row in rows]


async def _thought(policy: Policy, looking_back: Sequence[Message]) -> Completion | None:
    """Return the policy's reflection; None if its prompt is too long or it was cancelled."""
    try:
        [thought] = await policy.generate(looking_back)
    except PolicyError as error:
        if error.finish_reason not in ("context_overflow", "abort"):
            raise
        return None
    return None if thought.finish_reason == "abort" else thought


async def _gone_on(
    world: Environment, conversation: Conversation, policy: Policy, *, max_turns: int
) -> list[float]:
    """Continue an episode; return no rewards if the hint makes its prompt too long."""
    try:
        return await played(world, conversation, policy, max_turns=max_turns)
    except PolicyError as error:
        if conversation.turns or error.finish_reason not in ("context_overflow", "abort"):
            raise
        return []


def _named(text: str, steps: int, policy: Policy) -> int:
    """Return the step that a reflection names.

    >>> from rlake.loop.inference.scripted import ScriptedPolicy
    >>> [_named(said, 4, ScriptedPolicy([])) for said in ("**Step 3**: left", "step 9", "Go on!")]
    [3, 1, 1]
    """
    found = _STEP.search(text)
    step = int(found[1]) if found else 0
    if 1 <= step <= steps:
        return step
    record_metric(policy, "retry/no_step")
    return 1


async def _repeated(world: Environment, task: Task, turns: Sequence[Turn]) -> list[float] | None:
    """Replay the answers before the last turn in an environment; return the rewards.

    Return None if the environment shows anything other than the recorded prompts.
    """
    shown = beginning(task, await world.reset(task))
    rewards: list[float] = []
    for i, turn in enumerate(turns):
        if list(turn.messages) != shown:
            return None
        if i + 1 < len(turns):
            shown = after(turn)
            step = await world.step(shown[-1])
            rewards += [] if step.reward is None else [step.reward]
            if step.is_done:
                return None
            shown = [*shown, *as_messages(step.shown)]
    return rewards
