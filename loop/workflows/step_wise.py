"""Step-wise rollouts: each step of an agent is a row whose prompt describes the current state.

For `multi_step_grpo` and GiGPO (arXiv:2505.10978), whose anchor states are the rows' `prompt_text`,
the observation of the environment. Both can recover a rollout's outcome under every rule of
`rewards`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...operators.advantage.steps import DISCOUNT
from ...store.records import Experience, Message, Task
from ..environments.environment import Shown, Step
from ..environments.episode import EnvironmentSpec, as_messages, joined, noted, opened
from ..inference.policy import Policy, PolicyError
from ..trajectories.conversation import Conversation

Rule = Literal["last", "all", "discounted", "own"]


@dataclass
class _Past:
    """The observations and answers so far."""

    opening: list[Message]
    """The messages with which every step's prompt begins."""
    shown: list[list[Message]]
    answers: list[Message]

    def prompt(self, history: int | None) -> list[Message]:
        """Return the prompt of the next step, with the last `history` steps (None: all)."""
        first = 0 if history is None else max(0, len(self.answers) - history)
        [begun, *rest] = self.shown[first:] or [[]]
        made = list(self.opening)  # a copy: `+=` below must not extend the next steps' opening
        if len(begun) == 1 and begun[0].get("role") == "user":
            made = joined(made, begun[0]["content"])
        else:
            made += begun
        for answer, shown in zip(self.answers[first:], rest, strict=True):
            made += [answer, *shown]
        return made


async def step_wise(
    task: Task,
    policy: Policy,
    *,
    environment: EnvironmentSpec,
    max_turns: int = 16,
    history: int | None = 0,
    rewards: Rule = "last",
    gamma: float = 0.95,
    at_once: int | None = None,
    close_seconds: float = 10.0,
) -> list[Experience]:
    """Act in an environment as in `multi_turn`; each answer is a row with its own prompt.

    A prompt is the beginning of the episode, the last `history` steps (None: all) and the current
    observation. `rewards` sets the rewards of the rows: `last`, the sum over all steps at the last
    row and 0 at the others; `all`, that sum at each row; `discounted`, the return from the step
    on, discounted by `gamma`; `own`, each step's own reward. Under the last two rules `metrics`
    have `reward_discount`, `gamma` or 0, from which the steps' own rewards can be recovered. If no
    step has a reward, the configured rewards judge each row.
    """
    own: list[float | None] = []
    rows: list[Experience] = []
    async with opened(environment, policy, at_once=at_once, close_seconds=close_seconds) as world:
        past = _begun(task, await world.reset(task))
        for turn in range(1, max_turns + 1):
            conversation = Conversation(task, policy, messages=past.prompt(history))
            goes_on = await _asked(conversation, is_first=turn == 1)
            answer = conversation.messages[-1]
            step = noted(policy, await world.step(answer)) if goes_on else Step(is_done=True)
            if turn == max_turns and not step.is_done:
                conversation.finish("max_turns")
            made = conversation.rows()  # after `finish`, which sets the last row's finish reason
            rows += made
            own += [step.reward] * len(made)
            if step.is_done:
                break
            past.answers.append(answer)
            past.shown.append(as_messages(step.shown))
    return _rewarded(rows, own, rewards, gamma)


def _begun(task: Task, shown: Shown) -> _Past:
    if isinstance(shown, str):
        return _Past(list(task.messages), [as_messages(shown)], [])
    return _Past(list(shown[:-1]), [list(shown[-1:])], [])


async def _asked(conversation: Conversation, *, is_first: bool) -> bool:
    """Let the policy answer; return False if the prompt is too long or the rollout is cancelled."""
    try:
        completion = await conversation.respond()
    except PolicyError as error:
        if is_first or error.finish_reason not in ("context_overflow", "abort"):
            raise
        conversation.finish(error.finish_reason)
        return False
    return completion.finish_reason != "abort"


def _rewarded(
    rows: Sequence[Experience], own: Sequence[float | None], rule: Rule, gamma: float
) -> list[Experience]:
    if all(reward is None for reward in own):
        return list(rows)
    values = [reward or 0.0 for reward in own]
    discount = {"own": 0.0, "discounted": gamma}.get(rule)
    if rule == "all":
        values = [sum(values)] * len(values)
    elif rule == "last":
        values = [0.0] * (len(values) - 1) + [sum(values)]
    elif rule == "discounted":
        for i in range(len(values) - 2, -1, -1):
            values[i] += gamma * values[i + 1]
    mark = {} if discount is None else {DISCOUNT: discount}
    rewarded = [row.with_reward({"environment": v}) for row, v in zip(rows, values, strict=True)]
    return [replace(row, metrics={**row.metrics, **mark}) for row in rewarded]
