"""What is true: versioned Arrow tables of tasks, experiences and all that is known of them."""

from .errors import RlakeError
from .records import Experience, Task
from .store import Appended, Store, connect

__all__ = ["Appended", "Experience", "RlakeError", "Store", "Task", "connect"]
