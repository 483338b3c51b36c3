"""What is true: versioned Arrow tables of tasks, experiences and all that is known of them."""

from .appending import Appended
from .errors import RlakeError
from .opening import connect
from .records import Experience, Task
from .store import Store

__all__ = ["Appended", "Experience", "RlakeError", "Store", "Task", "connect"]
