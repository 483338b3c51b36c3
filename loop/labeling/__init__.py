"""People in the loop: queues of rows to label, forms to label them in, and what labels come to."""

from .majority import Settled, settle
from .question import Choice, Question, parse_choices
from .queue import Item, Queue, progress

__all__ = [
    "Choice",
    "Item",
    "Question",
    "Queue",
    "Settled",
    "parse_choices",
    "progress",
    "settle",
]
