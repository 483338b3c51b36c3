"""Which tasks come when: selectors, what they learn from the tries, and the record of both."""

from .curriculum import Curriculum

__all__ = ["Curriculum"]
