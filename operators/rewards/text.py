"""Rewards that read the reply as text: the answer in it, and its form."""

import re

from ...store.records import Experience, Task
from ..answer_extraction import boxed_in, number_in, plain, reply
from ..reward_protocol import Verdict


def exact_match(task: Task, experience: Experience) -> float | None:
    """1.0 when the last reply is the reference answer, ignoring surrounding space, else 0.0.

    >>> exact_match(Task.ask("2+2=", "4"), Experience(task_id="t", response_text=" 4\\n"))
    1.0
    """
    if task.answer is None:
        return None
    return float(reply(experience).strip() == task.answer.strip())


def numeric_answer(task: Task, experience: Experience) -> float | None:
    """1.0 when the last reply gives the reference number, else 0.0; None when there is none.

    The number stands after the last `####` or a line's `A:`, as in GSM8K (arXiv:2110.14168);
    without a mark, it is the last number of the text. `1,234`, `$72`,
    `72.0` and `72.` are read as numbers. `50%` is 50: the sign may be left out.

    >>> task = Task.ask("How many clips?", "48/2 = 24, 48+24 = 72\\n#### 72")
    >>> numeric_answer(task, Experience(task_id="t", response_text="It makes $72.00 in all."))
    1.0
    """
    expected = None if task.answer is None else number_in(task.answer)
    if expected is None:
        return None
    return float(number_in(reply(experience)) == expected)


def boxed(task: Task, experience: Experience) -> float | None:
    """1.0 when the last `\\boxed{...}` of the reply is the reference answer as text, else 0.0.

    Both are made plain first: space, `$`, `\\left`, `\\right`, `\\text{}`, thousands commas and a
    final full stop do not count. A last box that is not closed holds no answer. The reference is
    its own last box, what stands behind `####`, or the whole text. (The form of answers of MATH,
    arXiv:2103.03874; `math_equivalence` also sees that 1/2 is 0.5.)

    >>> said = Experience(task_id="t", response_text=r"so \\boxed{\\dfrac{1}{2}}.")
    >>> boxed(Task.ask("Half?", r"\\frac{1}{2}"), said)
    1.0
    """
    if task.answer is None:
        return None
    expected = boxed_in(task.answer) or task.answer.rpartition("####")[2]
    found = boxed_in(reply(experience))
    return float(found is not None and plain(found) == plain(expected))


def format_reward(
    task: Task,
    experience: Experience,
    *,
    tags: tuple[str, ...] | list[str] = ("think", "answer"),
    opened: bool = False,
) -> float:
    """1.0 when the reply is exactly its parts, each in its tags, in order and once; else 0.0.

    By default `<think>...</think><answer>...</answer>` with nothing but space around and between,
    and something in each. `opened`: the prompt has written the first opening tag already. (The
    format reward of DeepSeek-R1, arXiv:2501.12948.)

    >>> said = Experience(task_id="t", response_text="<think>2+2</think> <answer>4</answer>")
    >>> format_reward(Task.ask("2+2="), said)
    1.0
    """
    text = (f"<{tags[0]}>" if opened else "") + reply(experience).strip()
    marks = [f"<{slash}{tag}>" for tag in tags for slash in ("", "/")]
    if any(text.count(mark) != 1 for mark in marks):  # so that the pattern has no choice
        return 0.0
    parts = r"\s*".join(rf"<{re.escape(t)}>(.+?)</{re.escape(t)}>" for t in tags)
    match = re.fullmatch(parts, text, re.DOTALL)
    return float(match is not None and all(part.strip() for part in match.groups()))


def calibrated_answer(
    task: Task, experience: Experience, *, answer: str = "answer", confidence: str = "confidence"
) -> float | Verdict | None:
    """Correctness less the squared error of the stated confidence (RLCR, arXiv:2507.16806).

    1 or 0 for the text in the last `<answer>`, compared with the reference as in `boxed`, minus
    (confidence - correctness)^2, with the number from 0 to 1 in the last `<confidence>`: the Brier
    score. Both `answer` and `confidence` name tags. Without such a number the reward is that of
    being wrong with full confidence, -1, so that it never pays to leave it out.

    >>> said = "<answer>4</answer><confidence>0.5</confidence>"
    >>> calibrated_answer(Task.ask("2+2=", "4"), Experience(task_id="t", response_text=said))
    0.75
    """
    if task.answer is None:
        return None
    text = reply(experience)
    sure = _number(_in_tag(text, confidence))
    if sure is None or not 0 <= sure <= 1:
        return Verdict(-1.0, f"no number from 0 to 1 in <{confidence}>")
    said = _in_tag(text, answer)
    correct = float(said is not None and plain(said) == plain(task.answer))
    return correct - (sure - correct) ** 2


def _in_tag(text: str, tag: str) -> str | None:
    name = re.escape(tag)
    found = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
