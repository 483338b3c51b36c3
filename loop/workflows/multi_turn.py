"""Multi-turn rollouts: the policy acts in an environment and sees the effect of each answer."""

from ...store.records import Task
from ..environments.environment import Environment
from ..environments.episode import EnvironmentSpec, as_messages, beginning, noted, opened
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
    """Alternate between the policy and an environment for at most `max_turns` turns.

    `environment` is a built-in name, `package.module:name`, or `{name: {parameter: value}}`. Each
    rollout has its own environment, which is always closed (`environments.episode`). `at_once`
    limits how many are open at the same time; waiting for one counts toward the rollout's time but
    not toward `explorer.max_concurrent_rollouts`. The reward is the sum of the steps' rewards, as
    the part `environment`; if no step has one, the configured rewards judge the last answer. A
    conversation that becomes too long for the model ends as `context_overflow`, with the reward so
    far.
    """
    async with opened(environment, policy, at_once=at_once, close_seconds=close_seconds) as world:
        conversation = Conversation(task, policy, messages=beginning(task, await world.reset(task)))
        rewards = await played(world, conversation, policy, max_turns=max_turns)
    return {"environment": sum(rewards)} if rewards else None


async def played(
    world: Environment, conversation: Conversation, policy: Policy, *, max_turns: int
) -> list[float]:
    """Run an episode in an environment that was reset; return the rewards of its steps."""
    rewards: list[float] = []
    for turn in range(1, max_turns + 1):
        if not await conversation.try_respond():
            break
        step = noted(policy, await world.step(conversation.messages[-1]))
        rewards += [] if step.reward is None else [step.reward]
        if step.is_done:
            break
        if turn == max_turns:
            conversation.finish("max_turns")
        conversation.messages += as_messages(step.shown)
    return rewards
