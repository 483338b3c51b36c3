"""From what a policy says to one of so many actions."""

import re
from collections.abc import Sequence

_TAGGED = re.compile(r"<(action|answer)>((?:(?!<\1>).)*?)</\1>", re.DOTALL | re.IGNORECASE)


def action_in(text: str, names: Sequence[str]) -> int | None:
    """Return the number of the action that an answer names; None when it names none.

    What stands in the last `<action>` counts, else the whole answer: a name, its first letters
    where no other begins so, or a number. In a longer answer it is the last name.

    >>> names = ["left", "down", "right", "up"]
    >>> [action_in(said, names) for said in ("Up", "r", "2", "Not left. I go down!", "north")]
    [3, 2, 2, 1, None]
    >>> action_in("left or <action>right</action>? right", names)
    2
    """
    tagged = _TAGGED.findall(text)
    said = (tagged[-1][1] if tagged else text).strip().lower().rstrip(".!")
    known = [name.lower() for name in names]
    if said in known:
        return known.index(said)
    if said.isascii() and said.isdigit() and len(said) < 10:
        return int(said) if int(said) < len(known) else None
    begun = [i for i, name in enumerate(known) if said and name.startswith(said)]
    if len(begun) == 1:
        return begun[0]
    found = [
        (place.start(), len(name), i)
        for i, name in enumerate(known)
        for place in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", said)
    ]
    return max(found)[2] if found else None
