"""Toy tasks, rows and environments without downloads, for recipes, notebooks and tests.

A configuration names them in full, such as `rlake.loop.recipes.toys:addition`.
"""

from .data import compared_answers, compared_attempts, expert_answers
from .folders import folder_chores
from .helpdesk import helpdesk, outages
from .lakes import frozen_lake, frozen_lakes, frozen_squares, walks
from .mail import mail_questions, mails
from .orders import order_requests, orders
from .puzzles import countdown_games, sudoku, sudoku_right, sudokus
from .shop import errands, products
from .squares import overcounts, squares
from .sums import addition, forgetful_answers, mixed_sums, share_right, unsorted_digits
from .talks import talk_tasks, talks
from .workflows import furniture_mover, long_tail, step_by_step

__all__ = [
    "addition",
    "compared_answers",
    "compared_attempts",
    "countdown_games",
    "errands",
    "expert_answers",
    "folder_chores",
    "forgetful_answers",
    "frozen_lake",
    "frozen_lakes",
    "frozen_squares",
    "furniture_mover",
    "helpdesk",
    "long_tail",
    "mail_questions",
    "mails",
    "mixed_sums",
    "order_requests",
    "orders",
    "outages",
    "overcounts",
    "products",
    "share_right",
    "squares",
    "step_by_step",
    "sudoku",
    "sudoku_right",
    "sudokus",
    "talk_tasks",
    "talks",
    "unsorted_digits",
    "walks",
]
