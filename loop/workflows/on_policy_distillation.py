"""On-policy distillation: the policy answers, and a teacher scores each sampled token.

The teacher's log-probs, at the sampling temperature, are stored in `teacher_logprobs`. The
algorithm `on_policy_distillation` (arXiv:2306.13649) can then train on the rows at any time, and
repeatedly, without loading the teacher in the trainer. The teacher is a model of
`explorer.auxiliary_models` with the policy's tokenizer.
"""

from dataclasses import replace

from ...store.errors import ConfigError, JobError
from ...store.image_parts import media_ids
from ...store.records import Experience, Task
from ..inference.policy import Policy, default_sampling
from ..inference.scoring import scorer
from .single_turn import single_turn


async def on_policy_distillation(task: Task, policy: Policy, *, teacher: Policy) -> Experience:
    """Sample one answer and let the teacher score its tokens.

    Raises ConfigError when the teacher cannot score tokens, as an endpoint cannot, and for a task
    that shows images, which teachers do not see.
    """
    scores = scorer(teacher, "explorer.auxiliary_models.teacher")
    if media_ids(task.messages):
        raise ConfigError(
            f"task {task.task_id} shows images, expected text alone, since teachers do not see "
            "them yet; leave such tasks out (`tasks.where`)"
        )
    row = await single_turn(task, policy)
    if row.token_ids is None or row.prompt_length is None:
        raise JobError(f"`{row.engine}` reports no token ids, which the teacher needs")
    prompt, sampled = row.token_ids[: row.prompt_length], row.token_ids[row.prompt_length :]
    temperature = default_sampling(policy).temperature
    # Greedy sampling (temperature 0) has no distribution to score at, so the teacher uses 1.
    logprobs = await scores.score(prompt, sampled, temperature=temperature or 1.0)
    return replace(row, teacher_logprobs=[0.0] * len(prompt) + logprobs)
