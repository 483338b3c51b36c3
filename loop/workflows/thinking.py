"""Budget forcing, as in s1 (arXiv:2501.19393): thinking is cut off after a number of tokens.

The policy then answers.
"""

from dataclasses import replace

from ...store.records import Task
from ..inference.policy import Policy, default_sampling
from ..trajectories.conversation import Conversation
from ..trajectories.trajectory import record_metric


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

    `opening` begins the thought if the chat template does not, for example `<think>\\n`. A thought
    that does not reach `end` in time is closed with the text `forced`, which is not trained on (its
    mask is false). Thought and answer are one row, which the configured rewards judge as a whole.
    The metrics are `thinking/tokens`, and `thinking/forced` if the thought was closed. `max_answer`
    defaults to `sampling.max_tokens`.
    """
    conversation = Conversation(task, policy)
    usual = default_sampling(policy)
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
