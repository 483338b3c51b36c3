"""Frozen lakes that need no download: maps to cross, and a walker who seldom sees the holes.

A map is rows of letters as Gymnasium's FrozenLake has them: S the start, G the goal, H a hole, F
ice. What is shown has P where the walker stands.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from ....operators.seeded_random import chance
from ....store import Experience, Task
from ....store.errors import ConfigError
from ....store.records import Message
from .unique_draws import different

if TYPE_CHECKING:
    from ...models.chat_tokenizer import ConversationTokenizer

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""What each move adds to (row, column), in the order of Gymnasium's actions."""
Place = tuple[int, int]
STANDARD = ("SFFF", "FHFH", "FFFH", "HFFG")
"""The map of Gymnasium's FrozenLake-v1, as it is without any options."""


def frozen_squares(
    *,
    lakes: Sequence[Sequence[str]] = (STANDARD,),
    nearest: int = 1,
    held_out: int = 0,
    show: str = "lake",
    system: str = "",
    seed: int = 0,
    taskset: str = "frozen_squares",
) -> Iterator[Task]:
    """Yield a task for each square that known lakes can be crossed from: there a walk starts.

    The goal is `nearest` moves away, or more; where a map has its S is a square as any other.
    `held_out` random ones are for measuring; walks from others may well come by them. With `show`
    as `square` the prompt is the map, and behind it the row and the column of the start; else it
    is that of `frozen_lakes`, and the metadata always are.

    >>> squares = list(frozen_squares(show="square"))
    >>> len(squares), squares[3].metadata
    (11, {'desc': ['FFFS', 'FHFH', 'FFFH', 'HFFG'], 'shortest': 5})
    """
    starts = [
        _replaced(desc, place, "S")
        for desc in lakes
        for place, far in sorted(distances(desc).items())
        if far >= max(nearest, 1)
    ]
    held = set(np.random.default_rng(seed).permutation(len(starts))[:held_out].tolist())
    for i, desc in enumerate(starts):
        yield _task(desc, "eval" if i in held else "train", system, taskset, show)


def frozen_lakes(
    *,
    maps: int = 600,
    held_out: int = 100,
    size: int = 4,
    holes: float = 0.25,
    nearest: int = 2,
    system: str = "",
    seed: int = 0,
    taskset: str = "frozen_lakes",
) -> Iterator[Task]:
    """Yield so many different lakes, with random start and goal; `held_out` are for measuring.

    Each can be crossed, in `nearest` moves or more. The prompt is the map as it is seen at first;
    `system` is said before it. The metadata have the map (`desc`) and the moves of a shortest way.

    >>> [lake] = frozen_lakes(maps=1, held_out=0, seed=3)
    >>> print(lake.prompt_text)
    FFHF
    PFFF
    FFFG
    FFFH
    <BLANKLINE>
    >>> lake.metadata
    {'desc': ['FFHF', 'SFFF', 'FFFG', 'FFFH'], 'shortest': 4}
    """
    for i, desc in enumerate(_maps(maps, size, holes, nearest, np.random.default_rng(seed))):
        yield _task(desc, "eval" if i < held_out else "train", system, taskset)


def _task(desc: Sequence[str], split: str, system: str, taskset: str, show: str = "lake") -> Task:
    """Return the task to cross a lake from its S."""
    start = find(desc, "S")
    seen = _seen(show, desc, start)
    if show == "square":
        seen = "\n".join(_replaced(desc, start, "F")) + "\n" + seen
    message: list[Message] = [{"role": "system", "content": system}] if system else []
    return Task(
        messages=[*message, {"role": "user", "content": seen}],
        taskset=taskset,
        split=split,
        metadata={"desc": list(desc), "shortest": distances(desc)[start]},
    )


def _maps(
    maps: int, size: int, holes: float, nearest: int, rng: np.random.Generator
) -> Iterator[tuple[str, ...]]:
    """Yield different maps that can be crossed, in no order."""

    def draw() -> tuple[Hashable, tuple[str, ...]] | None:
        cells = rng.choice(["F", "H"], size * size, p=[1 - holes, holes])
        start, goal = rng.choice(size * size, 2, replace=False)
        cells[start], cells[goal] = "S", "G"
        desc = tuple("".join(cells[i : i + size]) for i in range(0, size * size, size))
        far = distances(desc).get(find(desc, "S"))
        return None if far is None or far < nearest else (desc, desc)

    what = f"lakes of size {size} with {holes:.0%} holes"
    advice = "ask for fewer `maps`, fewer `holes`, or a larger `size`"
    return different(draw, maps, what=what, advice=advice)


def find(desc: Sequence[str], letter: str) -> Place:
    """Return the row and column of a letter."""
    return next((r, row.index(letter)) for r, row in enumerate(desc) if letter in row)


def shown(desc: Sequence[str], place: Place) -> str:
    """Return a map as it is seen by who stands at `place`: P there, and ice where the start was."""
    return "\n".join(_replaced(desc, place, "P")) + "\n"


def square(desc: Sequence[str], place: Place) -> str:
    """Return the row and the column of a place, and nothing of the map: a tenth of the text."""
    return f"{place[0]},{place[1]}\n"


def _seen(show: str, desc: Sequence[str], place: Place) -> str:
    """Return how it is told where the walker stands."""
    known = {"lake": shown, "square": square}
    if show not in known:
        raise ConfigError(f"there is no `show: {show}`; expected one of {', '.join(known)}")
    return known[show](desc, place)


def _replaced(desc: Sequence[str], place: Place, letter: str) -> list[str]:
    """Return a map with a letter at a place, and ice where the start was."""
    rows = [row.replace("S", "F") for row in desc]
    r, c = place
    rows[r] = f"{rows[r][:c]}{letter}{rows[r][c + 1 :]}"
    return rows


def moved(desc: Sequence[str], place: Place, move: str) -> Place:
    """Return where a move leads; who would leave the lake stays."""
    r, c = (a + b for a, b in zip(place, MOVES[move], strict=True))
    inside = 0 <= r < len(desc) and 0 <= c < len(desc[0])
    return (r, c) if inside else place


def distances(desc: Sequence[str], *, blind: bool = False) -> dict[Place, int]:
    """Return the fewest moves to the goal from where it can be reached; `blind` sees no holes.

    >>> distances(["SH", "FG"])
    {(1, 1): 0, (1, 0): 1, (0, 0): 2}
    """
    goal = find(desc, "G")
    found, edge = {goal: 0}, [goal]
    for place in edge:  # it grows while it is read
        for move in MOVES:
            near = moved(desc, place, move)
            if near not in found and (blind or desc[near[0]][near[1]] != "H"):
                found[near] = found[place] + 1
                edge.append(near)
    return found


def walks(
    tasks: Sequence[Task],
    *,
    lost: float = 0.2,
    sees: float = 0.0,
    most: int = 8,
    each: int = 1,
    letters: bool = True,
    alphabet: str | None = None,
    history: bool = True,
    show: str = "lake",
    seed: int = 0,
) -> Mapping[str, Sequence[Experience]]:
    """Return the walks over lakes of one who heads for the goal and seldom sees the holes.

    With probability `lost` a move is any; else, with probability `sees`, it heeds the holes.
    `letters` says the first letter of a move only; `show` is as the tasks have it. The source of
    the rows is `expert`, their reward that of the whole walk: 1 where it ended at the goal within
    `most` moves. A row is the conversation up to one move, as text. With the `alphabet` of a tiny
    model it is a whole walk, as tokens, of which all moves are trained on; without `history` it is
    one move, and the map of that moment, as `step_wise` asks.

    >>> [lake] = frozen_lakes(maps=1, held_out=0, seed=3)
    >>> made = walks([lake], lost=0.0)
    >>> [(row.response_text, row.reward) for row in made["experiences"]]
    [('d', 1.0), ('r', 1.0), ('r', 1.0), ('r', 1.0)]
    """
    made: list[Experience] = []
    for task in tasks:
        for i in range(each):
            rows = _walk(task, (lost, sees), most, seed, i, show=show, letters=letters)
            if alphabet is not None:
                made.append(_whole(rows[-1], alphabet))
            else:
                made += rows if history else [_alone(row) for row in rows]
    return {"experiences": made}


def _walk(
    task: Task,
    care: tuple[float, float],
    most: int,
    seed: int,
    number: int,
    *,
    show: str,
    letters: bool,
) -> list[Experience]:
    """Return the rows of one walk."""
    desc = list((task.metadata or {}).get("desc", ()))
    if not desc:
        raise ConfigError(f"task {task.task_id} has no `desc`; make tasks by `frozen_lakes`")
    lost, sees = care
    ways = distances(desc, blind=True), distances(desc)
    group = f"walks-{lost:g}-{sees:g}-{most}-{letters:d}-{show}-{seed}/{task.task_id}"
    place, conversation, rows = find(desc, "S"), list(task.messages), []
    for step in range(most):
        far = ways[chance(seed, task.task_id, number, step, "sees") < sees]
        ahead = [m for m in MOVES if far.get(moved(desc, place, m), inf) < far[place]]
        lot = chance(seed, task.task_id, number, step)
        choice = list(MOVES) if lot < lost else ahead
        lot = chance(seed, task.task_id, number, step, "which")
        move = choice[int(lot * len(choice))]
        text = move[:1] if letters else move
        said: Message = {"role": "assistant", "content": text}
        rows.append(
            Experience(
                task_id=task.task_id,
                group_id=group,
                experience_id=f"{group}/{number:02d}/{step:02d}",
                rollout=number,
                messages=[*conversation, said],
                prompt_text=task.prompt_text,
                response_text=text,
                source="expert",
                num_turns=step + 1,
            )
        )
        place = moved(desc, place, move)
        if desc[place[0]][place[1]] in "GH":
            break
        conversation += [said, {"role": "user", "content": _seen(show, desc, place)}]
    reached = float(desc[place[0]][place[1]] == "G")
    return [row.with_reward({"reached": reached}) for row in rows]


def _alone(row: Experience) -> Experience:
    """Return a move as an answer to the map that it was made on."""
    conversation = list(row.messages or ())
    summary = [message for message in conversation if message["role"] == "system"]
    name = f"{row.experience_id}/alone"
    return replace(row, experience_id=name, messages=[*summary, *conversation[-2:]], num_turns=1)


def _whole(row: Experience, alphabet: str) -> Experience:
    """Return a walk as the tokens that a tiny model would have been asked with, and its moves."""
    tokenizer = _tokenizer(alphabet)
    tokens = tokenizer(list(row.messages or ()), None)
    assert not isinstance(tokens, str), f"a walk has tokens: {tokens}"
    return replace(
        row,
        experience_id=f"{row.experience_id}/{tokenizer.digest}",
        token_ids=tokens.token_ids,
        loss_mask=tokens.loss_mask,
        prompt_length=tokens.loss_mask.index(True),
        tokenizer=tokenizer.digest,
    )


@cache
def _tokenizer(alphabet: str) -> "ConversationTokenizer":
    from ...models.chat_tokenizer import ConversationTokenizer
    from ...models.load import character_tokenizer

    return ConversationTokenizer(character_tokenizer(alphabet))
