"""The policy thinks as long as it may; then the thought is closed for it, and it answers.

Budget forcing, as in s1 (arXiv:2501.19393).
"""

from dataclasses import replace

from ...store.records import Task
from ..inference.policy import Policy, Sampling
from ..trajectories.conversation import Conversation
from ..trajectories.trajectory import RolloutPolicy, record_metric


async def thinking_budget(
    task: Task,
    policy: Policy,
    *,
    max_thinking: int,
    max_answer: int | None = None,
    opening: str = "",
    end: str = "</think>",
    forced: str = "\n</think>\n\n",
) -> None:
    """Let the policy think for `max_thinking` tokens, then answer in `max_answer`.

    `opening` begins the thought where the chat template does not, as `<think>\\n`. A thought that
    does not come to `end` in time is closed with the text `forced`. What is forced is not trained
    on (its mask is false); thought and answer are one row, which the rewards of the configuration
    judge as a whole. Noted are `thinking/tokens`, and `thinking/forced` where it was closed. None:
    `max_answer` is `sampling.max_tokens`.
    """
    conversation = Conversation(task, policy)
    usual = policy.sampling if isinstance(policy, RolloutPolicy) else Sampling()
    thinks = replace(usual, max_tokens=max_thinking, stop=(*usual.stop, end))
    thought = await conversation.respond(sampling=thinks, prefix=opening)
    record_metric(policy, "thinking/tokens", float(len(thought.token_ids or ())))
    closed = end in thought.text  # its last token may say more
    if thought.finish_reason == "abort" or (thought.finish_reason == "stop" and not closed):
        return  # it answered, or ended, without closing a thought
    if not closed:
        record_metric(policy, "thinking/forced")
    answers = replace(usual, max_tokens=max_answer or usual.max_tokens)
    await conversation.try_respond(sampling=answers, prefix="" if closed else forced)
