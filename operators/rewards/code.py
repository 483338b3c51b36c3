"""Rewards of code: what a program does in a sandbox, against its tests."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ...store.errors import OperatorError
from ...store.records import Experience, Task
from ..answer_extraction import code_in, reply
from ..reward_protocol import Verdict
from ..sandbox import Limits, run_python

_HARNESS = """
import sys as _sys
_mark, _tests = _sys.stdin.readline().strip(), {tests}
_code = compile({code}, "answer.py", "exec")
_names = {{"__name__": "answer"}}
exec(_code, _names)
_passed, _why = 0, ""
for _test in _tests:
    try:
        exec(compile(_test, "test.py", "exec"), dict(_names))
        _passed += 1
    except Exception as _error:
        _why = _why or f"{{type(_error).__name__}}: {{_error}}"[:200]
print(f"\\n{{_mark}} {{_passed}} {{_why}}".rstrip("\\n"), flush=True)
"""


async def code_tests(
    task: Task,
    experience: Experience,
    *,
    share: bool = False,
    seconds: Annotated[float | int, Field(gt=0)] = 10.0,
    memory_mb: Annotated[int, Field(gt=0)] = 512,
    sandbox: Literal["confined", "unconfined"] = "confined",
) -> Verdict | None:
    """1.0 when the code of the reply passes all tests of the task, else 0.0, with the reason.

    The code is the reply's last fenced block, else all of it. The tests are `tests` of the task's
    metadata: Python statements, such as `assert f(2) == 4`, each run after the code; or `{"input",
    "output"}`, each a run of the program, whose output is compared without space at line ends.
    With `share` the reward is the share of tests passed. The code runs in a sandbox (see
    `rlake.operators.sandbox` for what that keeps out), `seconds` and `memory_mb` for each run.
    Where nothing can keep files from it, it is refused, unless `sandbox` is unconfined.
    What ends it early is named: timeout, memory, disk, processes, network, output, crash or error.

    Statements run in the code's own process: code that is written to deceive them may. Tests of
    input and output are judged outside. None when a task has no tests.

    >>> import asyncio
    >>> task = Task.ask("Double it.", metadata={"tests": ["assert f(2) == 4", "assert f(0) == 0"]})
    >>> said = Experience(task_id="t", response_text="def f(x):\\n    return x ** 2")
    >>> asyncio.run(code_tests(task, said))
    Verdict(value=1.0, detail='2 of 2 passed')
    """
    given = (task.metadata or {}).get("tests")
    if not given:
        return None
    tests: list[Any] = [given] if isinstance(given, str) else list(given)
    limits = Limits(
        seconds=float(seconds), memory=memory_mb << 20, unconfined=sandbox == "unconfined"
    )
    code = code_in(reply(experience))
    if all(isinstance(test, str) for test in tests):
        passed, why = await _statements(code, tests, limits)
    elif all(isinstance(test, Mapping) and {"input", "output"} <= set(test) for test in tests):
        passed, why = await _programs(code, tests, limits)
    else:
        raise OperatorError(
            "`tests` of a task must be Python statements, or all `{input, output}`, got "
            f"{json.dumps(tests)[:200]}"
        )
    value = passed / len(tests) if share else float(passed == len(tests))
    counts = f"{passed} of {len(tests)} passed"
    return Verdict(value, f"{counts}; {why}" if why else counts)


async def _statements(code: str, tests: Sequence[str], limits: Limits) -> tuple[int, str | None]:
    # the code prints to the same output: the mark tells our line from its own
    mark = secrets.token_hex(16)
    program = _HARNESS.format(tests=repr(list(tests)), code=repr(code))
    ended = await run_python(program, stdin=f"{mark}\n", limits=limits)
    if ended.how != "done":
        return 0, ended.detail
    lines = re.findall(rf"^{mark} (\d{{1,9}})(?: (.*))?$", ended.output, re.MULTILINE)
    passed, why = lines[-1] if lines else ("0", "error: it ended before the tests")
    if int(passed) > len(tests):  # the code itself said so
        return 0, "error: it ended before the tests"
    return int(passed), why or None


async def _programs(
    code: str, tests: Sequence[Mapping[str, Any]], limits: Limits
) -> tuple[int, str | None]:
    passed, why = 0, None
    for test in tests:
        ended = await run_python(code, stdin=str(test["input"]), limits=limits)
        if ended.how == "done" and _lines(ended.output) == _lines(str(test["output"])):
            passed += 1
            continue
        why = why or (f"printed {ended.output[:100]!r}" if ended.how == "done" else ended.detail)
        if ended.how == "timeout":  # the others would take as long each
            break
    return passed, why


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
