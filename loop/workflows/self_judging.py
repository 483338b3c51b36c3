"""The policy judges its own answers: RULER (OpenPipe's ART) with a trained judge.

A share of the groups is judged by the true rewards. There each rollout also judges the whole group
once; its judgment is a row in the group `judges`, whose reward is 1 minus the mean absolute error
of its scores, or 0 if they cannot be read. The answers of all other groups get the scores of the
policy from one request, which is not trained on. A few true rewards thus keep the judge honest, and
the judge provides rewards where none are known. Assumes true rewards between 0 and 1.
`metadata.part` is `answer` or `judge`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...operators.endpoint_replies import NoAnswerError
from ...operators.judging.judge import answer
from ...operators.judging.ruler import compared, scores
from ...operators.reward_protocol import of_group
from ...store.ids import content_id
from ...store.records import Experience, Task
from ..inference.policy import Policy, PolicyError, Turn
from ..trajectories.group import GroupPolicies
from ..trajectories.rewards import RewardSpec, judged
from ..trajectories.trajectory import to_experiences
from .single_turn import single_turn


@of_group
async def self_judging(
    task: Task, policies: GroupPolicies, *, reward: RewardSpec = "exact_match", truth: float = 0.2
) -> list[Experience]:
    """Answer with each of a group's policies, and judge by the true reward or by the policy.

    `reward` names the true reward functions, and `truth` is the share of groups that they judge; a
    task without an answer is always judged by the policy. The choice is a function of the samples.
    """
    made = await asyncio.gather(*(single_turn(task, policy) for policy in policies))
    rows = [replace(r, rollout_index=i, metadata={"part": "answer"}) for i, r in enumerate(made)]
    texts = [row.response_text for row in rows]
    # A hash, not a random draw: a group that is run again is judged the same way.
    share = int(content_id(task.task_id, texts, length=12), 16) / 16**12
    if task.answer is not None and share < truth:
        rows = list(await asyncio.gather(*(judged(task, row, reward) for row in rows)))
        known = [row for row in rows if row.reward is not None]
        if not known:
            return rows
        judges = [_judge(task, p, i, known, is_asked=True) for i, p in enumerate(policies)]
        return [*rows, *(row for made, _ in await asyncio.gather(*judges) for row in made)]
    judge, found = await _judge(task, policies[0], 0, rows, is_asked=False)
    if found is None:
        unread = "the policy's judgement cannot be read"
        nobody = [row.with_reward({"self_judged": None}) for row in rows]
        return [*(replace(row, drop_reason=unread) for row in nobody), *judge]
    scored = zip(rows, found, strict=True)
    return [*(row.with_reward({"self_judged": score}) for row, score in scored), *judge]


async def _judge(
    task: Task, policy: Policy, number: int, rows: Sequence[Experience], *, is_asked: bool
) -> tuple[list[Experience], list[float] | None]:
    """Let a policy judge a group; return its row, with a reward if `is_asked`, and the scores.

    Return no row and no scores if the rollouts together are too long for one prompt.
    """
    turns: list[Turn] = []

    async def ask(messages: Sequence[Any]) -> str:
        asked = [dict(m) for m in messages]
        [completion] = await policy.generate(asked)
        turns.append(Turn(messages=asked, completion=completion))
        return completion.text

    found: list[float] | None = None
    try:
        prompt = compared(task, rows)
        verdicts = await answer(ask, prompt, lambda x: scores(x, len(rows)), max_attempts=1)
        found = [float(verdict.value or 0.0) for verdict in verdicts]
    except NoAnswerError:
        pass  # an unreadable judgment is a bad one: its reward is 0
    except PolicyError as error:
        if error.finish_reason != "context_overflow":
            raise
        return [], None
    [row] = to_experiences(Task(messages=turns[0].messages), turns)
    row = replace(row, rollout_index=number, group_id="judges", metadata={"part": "judge"})
    if not is_asked:
        return [replace(row, drop_reason="a judgement without the truth to learn from")], found
    errors = [abs(a - (b.reward or 0.0)) for a, b in zip(found or [], rows, strict=bool(found))]
    accuracy = 0.0 if found is None else max(0.0, 1 - sum(errors) / len(errors))
    return [row.with_reward({"accuracy_of_scores": accuracy})], found
