"""Human labeling: queues of rows, forms in the terminal and browser, adjudicated labels."""

from .majority import Adjudicated, adjudicate
from .question import Choice, Question, parse_choices
from .queue import Item, Queue, progress

__all__ = [
    "Adjudicated",
    "Choice",
    "Item",
    "Question",
    "Queue",
    "adjudicate",
    "parse_choices",
    "progress",
]
