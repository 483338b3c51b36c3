"""Workflows: async functions that let a policy try a task, and return what can be trained on.

A workflow is `async (task, policy) -> Experience | list[Experience]`. It may raise: the explorer
stores a row with the error. Ids, run, step and reward are stamped by the explorer.
"""

from collections.abc import Awaitable, Callable

from ..store.records import Experience, Task
from .policy import Completion, Policy

Workflow = Callable[[Task, Policy], Awaitable[Experience | list[Experience]]]
"""What users write to produce experience."""


async def single_turn(task: Task, policy: Policy) -> Experience:
    """Ask once, answer once."""
    [completion] = await policy.generate(task.messages)
    return experience(task, completion)


def experience(task: Task, completion: Completion) -> Experience:
    """Turn one completion into a row: the sampled tokens, and only they, are trained on.

    Per-token columns are aligned with prompt and response together; at prompt tokens the mask is
    false and the log-prob 0.
    """
    prompt, sampled = completion.prompt_ids, completion.token_ids
    tokens: dict[str, object] = {}
    if prompt is not None and sampled is not None:
        before = len(prompt)
        tokens = {
            "token_ids": [*prompt, *sampled],
            "loss_mask": [False] * before + [True] * len(sampled),
            "logprobs": [0.0] * before + list(completion.logprobs) if completion.logprobs else None,
            "prompt_length": before,
        }
    return Experience(
        task_id=task.task_id,
        messages=[*task.messages, {"role": "assistant", "content": completion.text}],
        prompt_text=task.prompt_text,
        response_text=completion.text,
        finish_reason=completion.finish_reason,
        policy_version=completion.policy_version,
        segments=completion.segments,
        num_turns=1,
        **tokens,  # type: ignore[arg-type]
    )
