"""The countdown game: reach a number with given numbers, each used once."""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from ...store.records import Experience, Task
from ..answer_extraction import reply
from ..reward_protocol import Verdict

_LONGEST = 200
"""Characters of an expression: more nests deeper than any game needs."""
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})  # noqa: RUF001
_DO: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown(
    task: Task, experience: Experience, *, wrong_result: float = 0.0
) -> float | Verdict | None:
    """1.0 when the reply's expression uses each given number once and makes the target, else 0.0.

    The numbers and the target are `numbers` (or `nums`) and `target` of the task's metadata, or its
    answer. The expression stands in the last `<answer>`, else on the last line; `= 24` behind it
    is left out. Only + - * / and parentheses are read, with exact fractions, and nothing is
    executed. `wrong_result` is given to a proper expression that makes another number. (The task
    of TinyZero; None when a task has no numbers.)

    >>> task = Task.ask("Make 24 of 3, 3, 8, 8.", metadata={"numbers": [3, 3, 8, 8], "target": 24})
    >>> countdown(task, Experience(task_id="t", response_text="<answer>8/(3-8/3)</answer>"))
    1.0
    """
    known = task.metadata or {}
    numbers, target = known.get("numbers", known.get("nums")), known.get("target", task.answer)
    if numbers is None or target is None:
        return None
    try:
        used: list[int] = []
        result = _value(ast.parse(_expression(reply(experience)), mode="eval").body, used)
    except ZeroDivisionError:
        return Verdict(0.0, "it divides by zero")
    except (SyntaxError, ValueError) as error:
        return Verdict(0.0, f"no expression: {error}")
    if Counter(used) != Counter(int(n) for n in numbers):
        return Verdict(0.0, f"it uses {sorted(used)}, expected {sorted(numbers)}")
    # By its text: 0.1 as a float is not exactly a tenth, and the sum is exact.
    if result != Fraction(str(target)):
        return Verdict(wrong_result, f"it makes {result}, expected {target}")
    return 1.0


def _expression(text: str) -> str:
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    lines = (answers[-1] if answers else text).strip().splitlines()
    found = lines[-1].partition("=")[0].translate(_SIGNS).strip() if lines else ""
    if not found or len(found) > _LONGEST:
        raise ValueError(f"{len(found)} characters, expected 1 to {_LONGEST}")
    return found


def _value(node: Any, used: list[int]) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _DO:
        left, right = _value(node.left, used), _value(node.right, used)
        return _DO[type(node.op)](left, right)
    # `isinstance` would take True for 1
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    raise ValueError(f"`{ast.unparse(node)}` is neither a whole number nor + - * /")
