"""Frozen lakes: maps to cross, and demonstrations by a walker that seldom sees the holes.

A map is rows of letters as in Gymnasium's FrozenLake: S the start, G the goal, H a hole, F ice. An
observation has P at the walker's position.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from ....operators.statistics import seeded_uniform
from ....store import Experience, Task
from ....store.errors import ConfigError
from ....store.records import Message
from ...environments.gymnasium import GymnasiumEnvironment
from .data import different

if TYPE_CHECKING:
    from gymnasium import Env

    from ...models.chat_tokenizer import ConversationTokenizer

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""The change of (row, column) by each move, in the order of Gymnasium's actions."""
Place = tuple[int, int]
STANDARD = ("SFFF", "FHFH", "FFFH", "HFFG")
"""The default map of Gymnasium's FrozenLake-v1."""


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
    """Yield a task for each square from which known lakes can be crossed.

    The goal is at least `nearest` moves away; a map's own S is an ordinary square. `held_out`
    random squares have the split `eval`; walks from others may cross them. With `show="square"` the
    prompt is the map followed by the row and column of the start; else it is that of
    `frozen_lakes`, as the metadata are.

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
    """Yield different lakes with random start and goal; `held_out` have the split `eval`.

    Each can be crossed in at least `nearest` moves. The prompt is the first observation, after the
    system message `system`. The metadata have the map (`desc`) and the length of a shortest path.

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
    """Return the observation of a map from `place`: P there, and ice at the start."""
    return "\n".join(_replaced(desc, place, "P")) + "\n"


def square(desc: Sequence[str], place: Place) -> str:
    """Return the row and column of a place, without the map: a tenth of the text."""
    return f"{place[0]},{place[1]}\n"


def _seen(show: str, desc: Sequence[str], place: Place) -> str:
    known = {"lake": shown, "square": square}
    if show not in known:
        raise ConfigError(f"`show: {show}` does not exist; expected one of {', '.join(known)}")
    return known[show](desc, place)


def _replaced(desc: Sequence[str], place: Place, letter: str) -> list[str]:
    rows = [row.replace("S", "F") for row in desc]
    r, c = place
    rows[r] = f"{rows[r][:c]}{letter}{rows[r][c + 1 :]}"
    return rows


def moved(desc: Sequence[str], place: Place, move: str) -> Place:
    """Return where a move leads; a move off the lake stays."""
    r, c = (a + b for a, b in zip(place, MOVES[move], strict=True))
    inside = 0 <= r < len(desc) and 0 <= c < len(desc[0])
    return (r, c) if inside else place


def distances(desc: Sequence[str], *, blind: bool = False) -> dict[Place, int]:
    """Return the fewest moves to the goal from each place; `blind` ignores holes.

    >>> distances(["SH", "FG"])
    {(1, 1): 0, (1, 0): 1, (0, 0): 2}
    """
    goal = find(desc, "G")
    found, edge = {goal: 0}, [goal]
    for place in edge:  # grows during the loop
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
    """Return walks over lakes by an expert that heads for the goal and seldom sees the holes.

    With probability `lost` a move is random; otherwise, with probability `sees`, it avoids holes.
    With `letters`, an answer is the first letter of a move. `show` must be that of the tasks. Rows
    have the source `expert` and the reward of the whole walk: 1 if it reaches the goal within
    `most` moves. A row is the conversation up to one move, as text. With the `alphabet` of a tiny
    model it is a whole walk as tokens, all of whose moves are trained on; without `history` it is
    one move and its observation, as in the workflow `step_wise`.

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
    desc = list((task.metadata or {}).get("desc", ()))
    if not desc:
        raise ConfigError(f"task {task.task_id} has no `desc`; make tasks by `frozen_lakes`")
    lost, sees = care
    ways = distances(desc, blind=True), distances(desc)
    group = f"walks-{lost:g}-{sees:g}-{most}-{letters:d}-{show}-{seed}/{task.task_id}"
    place, conversation, rows = find(desc, "S"), list(task.messages), []
    for step in range(most):
        far = ways[seeded_uniform(seed, task.task_id, number, step, "sees") < sees]
        ahead = [m for m in MOVES if far.get(moved(desc, place, m), inf) < far[place]]
        lot = seeded_uniform(seed, task.task_id, number, step)
        choice = list(MOVES) if lot < lost else ahead
        lot = seeded_uniform(seed, task.task_id, number, step, "which")
        move = choice[int(lot * len(choice))]
        text = move[:1] if letters else move
        said: Message = {"role": "assistant", "content": text}
        rows.append(
            Experience(
                task_id=task.task_id,
                group_id=group,
                experience_id=f"{group}/{number:02d}/{step:02d}",
                rollout_index=number,
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
    conversation = list(row.messages or ())
    summary = [message for message in conversation if message["role"] == "system"]
    name = f"{row.experience_id}/alone"
    return replace(row, experience_id=name, messages=[*summary, *conversation[-2:]], num_turns=1)


def _whole(row: Experience, alphabet: str) -> Experience:
    """Return a walk as the tokens that a tiny model would have seen and sampled."""
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


def frozen_lake(
    *,
    max_steps: int = 8,
    is_slippery: bool = False,
    quiet: bool = True,
    show: str = "lake",
    **rest: Any,
) -> GymnasiumEnvironment:
    """Return FrozenLake-v1 on the map of a task of `frozen_lakes` or `frozen_squares`.

    The prompt already shows the map. The reward is 1 at the goal. An episode ends there, in a hole,
    and after `max_steps`. With `show="square"`, observations are the new row and column only. With
    `quiet`, an answer without a move repeats the last observation and adds no text. `rest` is
    passed to the environment `gymnasium`.
    """
    refused: dict[str, Any] = {"refused": "", "most_refused": max_steps} if quiet else {}
    return GymnasiumEnvironment(
        "FrozenLake-v1",
        **{
            "options": {"is_slippery": is_slippery},
            "from_task": ("desc",),
            "show": partial(_observed, show),
            "shows_first": False,
            "max_steps": max_steps,
            **refused,
            **rest,
        },
    )


def _observed(show: str, env: "Env[Any, Any]", observation: Any) -> str:
    desc: Any = getattr(env.unwrapped, "desc")  # noqa: B009 - what only this environment has
    rows = [b"".join(row).decode() for row in desc]
    return _seen(show, rows, divmod(int(observation), len(rows[0])))
