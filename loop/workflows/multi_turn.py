"""The policy acts in an environment, turn after turn, and sees what its answers did."""

from ...store.records import Task
from ..environments.environment import Environment
from ..environments.episode import EnvironmentSpec, beginning, noted, opened, told
from ..inference.policy import Policy
from ..trajectories.conversation import Conversation


async def multi_turn(
    task: Task,
    policy: Policy,
    *,
    environment: EnvironmentSpec,
    max_turns: int = 16,
    at_once: int | None = None,
    close_seconds: float = 10.0,
) -> dict[str, float | None] | None:
    """Let the policy and an environment answer each other, `max_turns` times at most.

    `environment` is a name, ours or `package.module:name`, or `{name: {parameter: value}}`; it is
    made for each try, and always closed (`environments.episode`). `at_once` bounds those that are
    open together; the wait is part of the try's time, which `explorer.max_concurrent_rollouts`
    does not count. The reward is the sum of the steps' rewards, as the part `environment`; when no
    step had one, the rewards of the configuration judge the try by its last answer. A conversation
    that becomes too long for the model ends as `context_overflow`, with the reward so far.
    """
    async with opened(environment, policy, at_once=at_once, close_seconds=close_seconds) as world:
        talk = Conversation(task, policy, messages=beginning(task, await world.reset(task)))
        rewards = await played(world, talk, policy, max_turns=max_turns)
    return {"environment": sum(rewards)} if rewards else None


async def played(
    world: Environment, talk: Conversation, policy: Policy, *, max_turns: int
) -> list[float]:
    """Let the policy and an environment that has begun answer each other; return the rewards."""
    rewards: list[float] = []
    for turn in range(1, max_turns + 1):
        if not await talk.try_respond():
            break
        step = noted(policy, await world.step(talk.messages[-1]))
        rewards += [] if step.reward is None else [step.reward]
        if step.is_done:
            break
        if turn == max_turns:
            talk.finish("max_turns")
        talk.messages += told(step.shown)
    return rewards
