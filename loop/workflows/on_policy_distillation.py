"""On-policy distillation: the policy answers, and a teacher says how likely it finds each token.

The teacher's log-probs are stored in `teacher_logprobs`, at the temperature sampled with; then the
algorithm `on_policy_distillation` (arXiv:2306.13649) trains on the rows with no teacher beside the
trainer, now or later, as often as one likes. The teacher is a model of
`explorer.auxiliary_models`, with the policy's tokens.
"""

from dataclasses import replace

from ...store.errors import JobError
from ...store.records import Experience, Task
from ..inference.policy import Policy, Sampling
from ..inference.scoring import that_scores
from .single_turn import single_turn


async def on_policy_distillation(task: Task, policy: Policy, *, teacher: Policy) -> Experience:
    """Ask once, and let the teacher score what was sampled.

    Raises ConfigError when the teacher cannot score tokens, as an endpoint cannot.
    """
    scorer = that_scores(teacher, "explorer.auxiliary_models.teacher")
    row = await single_turn(task, policy)
    if row.token_ids is None or row.prompt_length is None:
        raise JobError(f"`{row.engine}` gives no token ids, so that no teacher can score them")
    prompt, sampled = row.token_ids[: row.prompt_length], row.token_ids[row.prompt_length :]
    sampling = getattr(policy, "sampling", Sampling())
    message = await scorer.score(prompt, sampled, temperature=sampling.temperature or 1.0)
    return replace(row, teacher_logprobs=[0.0] * len(prompt) + message)
