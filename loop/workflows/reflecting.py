"""What workflows share in which a policy looks back on a try, and learns without the hint."""

from collections.abc import Sequence
from dataclasses import replace

from ...store.records import Experience, Message, Task
from ..inference.policy import Completion, Turn
from ..trajectories.trajectory import to_experiences

HINT = "{prompt}\n\nWhat was learned from an earlier try:\n{reflection}"
LONGEST = 8000
"""Characters of a reflection, or of a verdict's reason, that are shown."""


def hinted(messages: Sequence[Message], hint: str, reflection: str) -> list[Message]:
    """Return messages with a hint in the last of the user's.

    In `hint` that message and the reflection stand for `{prompt}` and `{reflection}`.
    """
    place = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=None)
    prompt = "" if place is None else str(messages[place].get("content") or "")
    summary = hint.replace("{reflection}", reflection[:LONGEST]).replace("{prompt}", prompt, 1)
    if place is None:
        return [*messages, {"role": "user", "content": summary.strip()}]
    return [*messages[:place], {**messages[place], "content": summary}, *messages[place + 1 :]]


def reflection_row(
    looking_back: Sequence[Message], thought: Completion, gain: float | None
) -> Experience:
    """Return what was said of a try as a row of the group `reflections`; `gain` is its reward."""
    turn = Turn(messages=looking_back, completion=thought)
    [row] = to_experiences(Task(messages=list(looking_back)), [turn])
    row = replace(row, metadata={"part": "reflection"}, group_id="reflections")
    return row.with_reward({"gain": gain})


def without_hint(
    turns: Sequence[Turn], asked: Sequence[Message], prompt_ids: Sequence[int] | None
) -> list[Turn] | None:
    """Return turns as they would stand behind another first prompt.

    `asked` and `prompt_ids` are that prompt; all that was sampled and told behind the old one is
    written on behind it, token for token. None when a turn's prompt does not continue the turn
    before, as with templates that write earlier answers anew.
    """
    made: list[Turn] = []
    size = len(turns[0].messages)
    behind: list[int] | None = None if prompt_ids is None else list(prompt_ids)
    for i, turn in enumerate(turns):
        if i and behind is not None:
            told = _told(turns[i - 1].completion, turn.completion)
            if told is None:
                return None
            behind = [*behind, *told]
        completion = replace(turn.completion, prompt_ids=behind)
        messages = [*asked, *turn.messages[size:]]
        made.append(replace(turn, messages=messages, completion=completion))
    return made


def _told(last: Completion, this: Completion) -> list[int] | None:
    """Return the tokens behind a prompt up to the next one; None: the next is another prompt."""
    if last.prompt_ids is None or last.token_ids is None or this.prompt_ids is None:
        return None
    size, before = len(last.prompt_ids), [*last.prompt_ids, *last.token_ids]
    is_continued = list(this.prompt_ids[: len(before)]) == before
    return list(this.prompt_ids[size:]) if is_continued else None
