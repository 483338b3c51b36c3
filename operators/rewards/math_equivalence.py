"""Mathematical equivalence, decided by math-verify in processes that may be killed."""

import asyncio
import atexit
import json
import os
import subprocess
import sys
from collections import deque
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import BoundedSemaphore
from typing import Annotated

from pydantic import Field

from ...store.errors import JobError, missing_extra
from ...store.records import Experience, Task
from ..answer_extraction import marked, reply
from ..reward_protocol import Verdict

_PROGRAM = Path(__file__).with_name("math_worker.py")
_LONGEST = 20_000
"""Characters of a reply that are looked at, from its end, where answers stand."""

Seconds = Annotated[float, Field(gt=0)]


async def math_equivalence(
    task: Task, experience: Experience, *, seconds: Seconds | int = 5.0
) -> float | Verdict | None:
    r"""1.0 when the reply's answer equals the reference as mathematics, else 0.0.

    1/2 is 0.5, `x(x+1)` is `x^2+x`, `{1,2}` is `{2,1}`. The answer is what stands in the last box,
    behind the last `####` or a line's `A:`, or else what math-verify finds last. None when the
    reference is not mathematics. Raises TimeoutError when it is not decided within `seconds`: it
    works in a process of its own, which is killed. (Package math-verify, extra `math`.)

    >>> import asyncio
    >>> said = Experience(task_id="t", response_text=r"so it is \boxed{\frac{1}{2}}")
    >>> asyncio.run(math_equivalence(Task.ask("Half?", "0.5"), said))
    1.0
    """
    if task.answer is None:
        return None
    asked = marked(task.answer)[-_LONGEST:], marked(reply(experience))[-_LONGEST:]
    message = await asyncio.to_thread(_compare, *asked, float(seconds))
    value, detail = json.loads(message)
    return Verdict(value, detail) if detail else value


class _Comparing:
    """A process that compares answers, one at a time; it ends with the one that started it."""

    def __init__(self) -> None:
        if find_spec("math_verify") is None:
            raise missing_extra("math-verify", "environments")
        self._process = subprocess.Popen(
            # -I: a file in the user's folder must not stand in for a module of the checker.
            [sys.executable, "-I", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdin, "it was asked for"
        assert self._process.stdout, "it was asked for"
        self._asks, self._says = self._process.stdin, self._process.stdout
        if not self._says.readline():  # else the first row's time would include the loading
            raise JobError("the process that compares answers did not start")

    def ask(self, gold: str, text: str, seconds: float) -> str:
        with suppress(BrokenPipeError):
            self._asks.write(json.dumps([gold, text, seconds]) + "\n")
            self._asks.flush()
        return self._says.readline()

    def close(self) -> None:
        self._process.kill()
        with suppress(BrokenPipeError):
            self._asks.close()
        self._says.close()
        self._process.wait()


_idle: deque[_Comparing] = deque()


@cache
def _free() -> BoundedSemaphore:
    return BoundedSemaphore(os.cpu_count() or 1)


def _compare(gold: str, text: str, seconds: float) -> str:
    with _free():
        one = _idle.pop() if _idle else _Comparing()
        message = one.ask(gold, text, seconds)
        if message:
            _idle.append(one)
            return message
        # it exceeded its time or memory, and is dead; the next comparison starts another
        one.close()
    raise TimeoutError(f"the answers were not compared within {seconds:g} s")


@atexit.register
def _end() -> None:
    while _idle:
        _idle.pop().close()
