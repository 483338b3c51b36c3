"""Shared parts of workflows in which a policy reflects on a rollout and learns without the hint."""

from collections.abc import Sequence
from dataclasses import replace

from ...store.records import Experience, Message, Task
from ..inference.policy import Completion, Turn
from ..trajectories.trajectory import to_experiences

HINT = "{prompt}\n\nWhat was learned from an earlier attempt:\n{reflection}"
LONGEST = 8000
"""Most characters shown of a reflection, or of a verdict's reason."""


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
