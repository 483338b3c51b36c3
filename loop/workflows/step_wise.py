"""An agent's steps as rows of their own, each with a prompt that says where it stands.

For `multi_step_grpo` and GiGPO (arXiv:2505.10978), whose anchor states are the rows' `prompt_text`:
what the environment showed. Both find a rollout's outcome by every rule of `rewards`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...operators.advantage.steps import DISCOUNT
from ...store.records import Experience, Message, Task
from ..environments.environment import Shown, Step
from ..environments.episode import EnvironmentSpec, joined, noted, opened, told
from ..inference.policy import Policy, PolicyError
from ..trajectories.conversation import Conversation

Rule = Literal["last", "all", "discounted", "own"]


@dataclass
class _Past:
    """What was shown and answered so far."""

    opening: list[Message]
    """What every step's prompt begins with."""
    shown: list[list[Message]]
    answers: list[Message]

    def prompt(self, history: int | None) -> list[Message]:
        """Return what the policy is asked now, with as many earlier steps."""
        first = 0 if history is None else max(0, len(self.answers) - history)
        [begun, *rest] = self.shown[first:] or [[]]
        made = list(self.opening)
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
    """Act in an environment as in `multi_turn`; each answer is a row with a prompt of its own.

    A prompt is how the episode began, the last `history` steps (None: all) and what is shown now.
    `rewards` says which rows have which: `last`, the sum of all steps at the last row and 0 at the
    others; `all`, that sum at each; `discounted`, what came from the step on, each later step
    times `gamma` once more; `own`, each step's own. By the last two rules `metrics` have
    `reward_discount`, `gamma` or 0, so that the steps' own rewards can be told from the rows. When
    no step had a reward, the rewards of the configuration judge each row.
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
            made = conversation.rows()
            rows += made
            own += [step.reward] * len(made)
            if step.is_done:
                break
            past.answers.append(answer)
            past.shown.append(told(step.shown))
    return _rewarded(rows, own, rewards, gamma)


def _begun(task: Task, shown: Shown) -> _Past:
    if isinstance(shown, str):
        return _Past(list(task.messages), [told(shown)], [])
    return _Past(list(shown[:-1]), [list(shown[-1:])], [])


async def _asked(talk: Conversation, *, is_first: bool) -> bool:
    """Let the policy answer; false when the prompt became too long, or the try is stopped."""
    try:
        completion = await talk.respond()
    except PolicyError as error:
        if is_first or error.finish_reason not in ("context_overflow", "abort"):
            raise
        talk.finish(error.finish_reason)
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
        for place in range(len(values) - 2, -1, -1):
            values[place] += gamma * values[place + 1]
    mark = {} if discount is None else {DISCOUNT: discount}
    rewarded = [row.with_reward({"environment": v}) for row, v in zip(rows, values, strict=True)]
    return [replace(row, metrics={**row.metrics, **mark}) for row in rewarded]
