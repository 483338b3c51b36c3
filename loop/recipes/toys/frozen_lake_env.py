"""Gymnasium's FrozenLake on the maps of tasks, as text: the walker is P, the goal G, holes H."""

from typing import Any

from ...environments.gymnasium import GymnasiumEnvironment


def frozen_lake(
    *, max_steps: int = 8, is_slippery: bool = False, quiet: bool = True, **rest: Any
) -> GymnasiumEnvironment:
    """FrozenLake-v1 on the map of a task, as `frozen_lakes` and `frozen_squares` make them.

    The prompt shows it already. The reward is 1 at the goal, where it ends, as in a hole and after
    `max_steps`. With `show` as `square` only the row and the column are told of a move. With
    `quiet` an answer that is no move is answered with what was shown once more and no word. `rest`
    goes to `gymnasium`.
    """
    told: dict[str, Any] = {"refused": "", "most_refused": max_steps} if quiet else {}
    return GymnasiumEnvironment(
        "FrozenLake-v1",
        **{
            "options": {"is_slippery": is_slippery},
            "from_task": ("desc",),
            "show": "lake",
            "shows_first": False,
            "max_steps": max_steps,
            **told,
            **rest,
        },
    )
