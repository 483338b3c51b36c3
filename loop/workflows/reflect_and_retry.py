"""Reflect and retry: what went wrong is put into words, and the words help to do it again.

R3L (arXiv:2601.03715) makes good tries out of bad ones so, where sampling again finds none;
"Reflect, Retry, Reward" (arXiv:2505.24726) trains what was said in between. The rows of a try, as
`metadata.part` names them:

- `first`: the first answer, with its reward
- `reflection`: what the policy says of it, in the group `reflections` of the same tries, whose
  reward is how much the second answer was better than the first
- `retry`: the second answer, with its reward. It was sampled with the reflection in its prompt, and
  stands behind the task's own prompt, so that it is learned without the hint; its log-probs are
  those that it was sampled with, and `metrics` has `is_guided`. Needs an algorithm that weighs rows
  by the ratio of the two policies, or clips it.

A first answer that is good enough is the only row. In an environment `retry_from_step` goes on from
the step that failed, as R3L does; its amplification of what succeeded is the algorithm's affair, as
with `asymre`.
"""

from dataclasses import replace

from ...store.records import Experience, Message, Task
from ..inference.policy import Completion, Policy, Turn
from ..trajectories.rewards import RewardSpec, judged
from ..trajectories.trajectory import to_experiences
from .reflecting import HINT, LONGEST, hinted, reflection_row

_REFLECT = (
    "That was judged {verdict}. Say in a few sentences what went wrong, and what to do another "
    "time. Do not solve it here."
)


async def reflect_and_retry(
    task: Task,
    policy: Policy,
    *,
    reward: RewardSpec = "exact_match",
    enough: float = 1.0,
    keep_hint: bool = False,
    reflect: str = _REFLECT,
    hint: str = HINT,
) -> list[Experience]:
    """Answer; below a reward of `enough`, reflect on the verdict, and answer again.

    `reward` names the functions that judge both answers. In `reflect` the verdict stands for
    `{verdict}`; in `hint` the task's last message and the reflection for `{prompt}` and
    `{reflection}`. With `keep_hint` the second answer is learned behind the prompt with the hint.
    """
    asked = list(task.messages)
    [one] = await policy.generate(asked)
    first = await judged(task, _row(task, asked, one, part="first"), reward)
    if first.reward is None or first.reward >= enough:
        return [first]
    summary = reflect.replace("{verdict}", _verdict(first))
    looking_back: list[Message] = [*asked, one.answer, {"role": "user", "content": summary}]
    [thought] = await policy.generate(looking_back)
    guided = hinted(asked, hint, thought.text)
    [two] = await policy.generate(guided)
    if keep_hint:
        second = _row(task, guided, two, part="retry")
    else:
        second = _row(task, asked, replace(two, prompt_ids=one.prompt_ids), part="retry")
    second = await judged(task, replace(second, metrics={**second.metrics, "is_guided": 1}), reward)
    gain = None if second.reward is None else second.reward - first.reward
    return [first, reflection_row(looking_back, thought, gain), second]


def _row(task: Task, asked: list[Message], completion: Completion, *, part: str) -> Experience:
    """Return an answer as a row of its own, whatever was said before it."""
    [row] = to_experiences(task, [Turn(messages=asked, completion=completion)])
    return replace(row, metadata={"part": part})


def _verdict(row: Experience) -> str:
    """Say how good an answer was, with the reasons that rewards gave."""
    reasons = (row.metadata or {}).get("reward_details") or {}
    message = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return f"{row.reward:g}" + (f" ({message[:LONGEST]})" if message else "")
