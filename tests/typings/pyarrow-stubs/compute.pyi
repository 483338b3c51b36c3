# For pyright only (stubPath in pyproject.toml): pyarrow makes these functions at import time.
from typing import Any

def __getattr__(name: str) -> Any: ...
