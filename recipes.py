"""Toy tasks, demonstrations and rewards without downloads, and GSM8K's files.

Packaged configurations use them; `rlake.RunConfig.from_yaml("grpo_digits")` reads one by its name.

>>> from rlake.recipes import addition
>>> next(addition(low=2, high=3, held_out=0)).prompt_text
'2+2='
"""

from typing import TYPE_CHECKING, Any

from .loop.recipes.gsm8k import find as find_gsm8k

if TYPE_CHECKING:
    from .loop.recipes.toys import addition as addition
    from .loop.recipes.toys import compared_answers as compared_answers
    from .loop.recipes.toys import countdown_games as countdown_games
    from .loop.recipes.toys import expert_answers as expert_answers
    from .loop.recipes.toys import forgetful_answers as forgetful_answers
    from .loop.recipes.toys import frozen_lakes as frozen_lakes
    from .loop.recipes.toys import long_tail as long_tail
    from .loop.recipes.toys import share_right as share_right
    from .loop.recipes.toys import sudokus as sudokus
    from .loop.recipes.toys import unsorted_digits as unsorted_digits
    from .loop.tasks.sources import from_sql as from_sql

_TOYS = ("addition", "compared_answers", "countdown_games", "expert_answers", "forgetful_answers")
_TOYS += ("frozen_lakes", "long_tail", "share_right", "sudokus", "unsorted_digits")
__all__ = ["find_gsm8k", "from_sql", *_TOYS]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    # The toys need the extra `train`, and GSM8K's files do not.
    if name in _TOYS:
        from .loop.recipes import toys

        return getattr(toys, name)
    if name == "from_sql":
        from .loop.tasks.sources import from_sql

        return from_sql
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
