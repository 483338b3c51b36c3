"""The local executor: a few threads process partitions, and return them in order."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ClassVar

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from ...store import Store
from ..cache import OperatorCache
from ..running.apply_stage import StageWork, Treated, treat
from ..running.staged_rows import Part

PART_BYTES = 32 << 20


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Local:
    """Threads of this process; one part more than there are threads is in memory."""

    name: ClassVar[str] = "local"
    in_files: ClassVar[bool] = False
    """Whether rows between stages must be in files."""
    folder: ClassVar[str | None] = None
    threads: PositiveInt = 2
    part_bytes: PositiveInt = PART_BYTES
    """Estimated bytes of the rows of a part."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Do nothing: threads start with the parts."""
        yield

    def treated(
        self, work: StageWork, parts: Sequence[Part], store: Store, cache: OperatorCache
    ) -> Iterator[Treated]:
        """Yield the outcome of each part, in order."""
        waiting: deque[Future[Treated]] = deque()
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="rlake-part")
        try:
            for part in parts:
                waiting.append(pool.submit(treat, work, part, cache))
                # one part more than threads: they work while the caller stores a part
                if len(waiting) > self.threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
