"""What is true: versioned Arrow tables of tasks, experiences and all that is known of them."""

from .append import Appended
from .connect import connect
from .errors import RlakeError
from .records import Experience, Task
from .store import Store

__all__ = ["Appended", "Experience", "RlakeError", "Store", "Task", "connect"]
