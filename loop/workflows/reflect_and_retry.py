"""Reflect and retry: the policy describes what went wrong and answers again with that as a hint.

R3L (arXiv:2601.03715) obtains good rollouts this way where resampling finds none; "Reflect, Retry,
Reward" (arXiv:2505.24726) trains the reflection. The rows of a rollout, by `metadata.part`:

- `first`: the first answer, with its reward
- `reflection`: the policy's reflection on it, in the subgroup `reflections`; its reward is the
  reward of the second answer minus that of the first
- `retry`: the second answer, with its reward. It is sampled with the reflection in the prompt but
  stored after the task's original prompt, so that the policy learns to answer without the hint. Its
  log-probs are those of sampling, and `metrics` has `is_guided`. It needs an algorithm that weights
  rows by the ratio of the two policies, or clips it.

If the first answer is good enough, it is the only row. For environments, use `retry_from_step`,
which resumes from the step that failed, as R3L does. R3L's amplification of successes is up to the
algorithm, for example `asymre`.
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

    `reward` names the functions that judge both answers. `{verdict}` in `reflect` is replaced by
    the verdict; `{prompt}` and `{reflection}` in `hint` by the task's last message and the
    reflection. With `keep_hint`, the second answer is stored after the prompt with the hint.
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
        # Only the prompt is exchanged: the log-probs stay those of sampling, for importance ratios.
        second = _row(task, asked, replace(two, prompt_ids=one.prompt_ids), part="retry")
    second = await judged(task, replace(second, metrics={**second.metrics, "is_guided": 1}), reward)
    gain = None if second.reward is None else second.reward - first.reward
    return [first, reflection_row(looking_back, thought, gain), second]


def _row(task: Task, asked: list[Message], completion: Completion, *, part: str) -> Experience:
    [row] = to_experiences(task, [Turn(messages=asked, completion=completion)])
    return replace(row, metadata={"part": part})


def _verdict(row: Experience) -> str:
    """Return the reward of an answer as text, with the reasons of the reward functions."""
    reasons = (row.metadata or {}).get("reward_details") or {}
    message = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return f"{row.reward:g}" + (f" ({message[:LONGEST]})" if message else "")
