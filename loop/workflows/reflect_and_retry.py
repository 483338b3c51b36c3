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
algorithm `r3l`.
"""

from collections.abc import Sequence
from dataclasses import replace

from ...store.records import Experience, Message, Task
from ..inference.policy import Completion, Policy, Turn
from ..trajectories.rewards import RewardSpec, judged
from ..trajectories.trajectory import to_experiences

HINT = "{prompt}\n\nWhat was learned from an earlier attempt:\n{reflection}"
LONGEST = 8000
"""Most characters shown of a reflection, or of a verdict's reason."""
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


def hinted(messages: Sequence[Message], hint: str, reflection: str) -> list[Message]:
    """Return messages with a hint added to the last user message.

    `{prompt}` and `{reflection}` in `hint` are replaced by that message and the reflection.
    """
    place = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=None)
    prompt = "" if place is None else str(messages[place].get("content") or "")
    # The reflection goes first, so that `{reflection}` inside a prompt is left alone. `str.format`
    # would fail on any other braces in the hint.
    summary = hint.replace("{reflection}", reflection[:LONGEST]).replace("{prompt}", prompt, 1)
    if place is None:
        return [*messages, {"role": "user", "content": summary.strip()}]
    return [*messages[:place], {**messages[place], "content": summary}, *messages[place + 1 :]]


def reflection_row(
    looking_back: Sequence[Message], thought: Completion, gain: float | None
) -> Experience:
    """Return a reflection as a row of the group `reflections`; `gain` is its reward."""
    turn = Turn(messages=looking_back, completion=thought)
    [row] = to_experiences(Task(messages=list(looking_back)), [turn])
    row = replace(row, metadata={"part": "reflection"}, group_id="reflections")
    return row.with_reward({"gain": gain})


def without_hint(
    turns: Sequence[Turn], asked: Sequence[Message], prompt_ids: Sequence[int] | None
) -> list[Turn] | None:
    """Return turns with another first prompt.

    `asked` and `prompt_ids` are the new prompt; all tokens after the old prompt, sampled or not,
    are appended to it unchanged. Return None if a turn's prompt does not continue the previous
    turn, as with templates that rewrite earlier answers.
    """
    made: list[Turn] = []
    size = len(turns[0].messages)
    behind: list[int] | None = None if prompt_ids is None else list(prompt_ids)
    for i, turn in enumerate(turns):
        if i and behind is not None:
            added = _added_tokens(turns[i - 1].completion, turn.completion)
            if added is None:
                return None
            behind = [*behind, *added]  # a new list: the turn before keeps the old one
        completion = replace(turn.completion, prompt_ids=behind)
        messages = [*asked, *turn.messages[size:]]
        made.append(replace(turn, messages=messages, completion=completion))
    return made


def _added_tokens(last: Completion, this: Completion) -> list[int] | None:
    """Return the tokens that a prompt adds to the last one; None if it does not continue it."""
    if last.prompt_ids is None or last.token_ids is None or this.prompt_ids is None:
        return None
    size, before = len(last.prompt_ids), [*last.prompt_ids, *last.token_ids]
    is_continued = list(this.prompt_ids[: len(before)]) == before
    return list(this.prompt_ids[size:]) if is_continued else None
