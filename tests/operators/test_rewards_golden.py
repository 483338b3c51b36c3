"""Golden cases of each reward, from its definition; the nasty ones are those that hack it."""

import asyncio
import json
import math
import threading
import time
from inspect import isawaitable
from typing import Any

import pytest

from rlake.operators import rewards
from rlake.operators.reward_protocol import with_parameters
from rlake.operators.rewards import Verdict
from rlake.operators.scoring import reward_of
from rlake.store import Experience, Task
from rlake.store.errors import OperatorError


def said(text: str | None = None, **columns: Any) -> Experience:
    return Experience(task_id="t", response_text=text, **columns)


def value(reward: str, task: Task, experience: Experience, **parameters: Any) -> float | None:
    """Return the number that a reward gives, by the way that configurations take."""
    _, function = reward_of({reward: parameters})
    made = function(task, experience)
    if isawaitable(made):

        async def wait() -> Any:
            return await made

        made = asyncio.run(wait())
    return made.value if isinstance(made, Verdict) else made


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        (r"\frac{1}{2}", r"so \boxed{\frac{1}{2}}", 1.0),
        ("12", r"\boxed{11}, no: \boxed{12}", 1.0),
        ("11", r"\boxed{11}, no: \boxed{12}", 0.0),
        (r"\sqrt{\frac{1}{2}}", r"\boxed{\sqrt{\frac{1}{2}}}.", 1.0),
        (r"\{1,2\}", r"\boxed{\{1, 2\}}", 1.0),
        ("1,234", r"\boxed{1234}", 1.0),
        ("5", r"\boxed{5\text{ }}", 1.0),
        ("5", r"$\boxed{ 5. }$", 1.0),
        (r"\boxed{7}", r"\fbox{7}", 1.0),
        ("2+5 = 7\n#### 7", r"\boxed{7}", 1.0),
        (r"\dfrac{1}{2}", r"\boxed{\tfrac{1}{2}}", 1.0),
        ("12", "12", 0.0),
        ("12", r"\boxed{12} or \boxed{1", 0.0),
        ("12", r"\boxed{}", 0.0),
        ("12", None, 0.0),
        ("0.5", r"\boxed{\frac{1}{2}}", 0.0),
        (None, r"\boxed{1}", None),
    ],
)
def test_boxed_reads_the_last_box_with_balanced_braces(
    answer: str | None, text: str | None, reward: float | None
) -> None:
    assert value("boxed", Task.ask("?", answer), said(text)) == reward


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a\n\nb</think>\n<answer>4</answer>\n", 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think><think>a</think></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a</think><answer>b</answer> and more", 0.0),
        (None, 0.0),
    ],
)
def test_format_is_all_or_nothing(text: str | None, reward: float) -> None:
    assert value("format_reward", Task.ask("?"), said(text)) == reward


def test_format_takes_other_tags_and_a_prompt_that_opened_the_first() -> None:
    task = Task.ask("?")
    assert value("format_reward", task, said("<a>1</a><b>2</b>"), tags=["a", "b"]) == 1.0
    opened = said("why</think><answer>4</answer>")
    assert (value("format_reward", task, opened), value("format_reward", task, opened, opened=True)) == (0.0, 1.0)  # fmt: skip  # noqa: E501


GAME = {"numbers": [3, 3, 8, 8], "target": 24}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>8/(3-8/3)</answer>", 1.0),
        ("I try.\n8 ÷ (3 − 8 ÷ 3) = 24", 1.0),  # noqa: RUF001
        ("<answer>8*3</answer>", 0.0),  # two numbers are left
        ("<answer>3*8+(3-3)*8</answer>", 0.0),  # 3 three times
        ("<answer>8+8+3+3</answer>", 0.3),
        ("<answer>24</answer>", 0.0),
        ("<answer>3**8+8-3</answer>", 0.0),
        ("<answer>-3+3+8*8</answer>", 0.0),
        ("<answer>8//3+8+3</answer>", 0.0),
        ("<answer>8/(3-3)+8</answer>", 0.0),
        ("<answer>__import__('os').getpid()</answer>", 0.0),
        ("<answer>8.0/(3-8/3)</answer>", 0.0),
        ("<answer>True+3+8+8</answer>", 0.0),
        ("<answer>8/(3-8/3</answer>", 0.0),
        ("<answer>" + "(" * 5000 + "</answer>", 0.0),
        ("<answer>9**9**9**9</answer>", 0.0),
        ("<answer></answer>", 0.0),
        (None, 0.0),
    ],
)
def test_countdown_uses_each_number_once_and_executes_nothing(
    text: str | None, reward: float
) -> None:
    task = Task.ask("Make 24.", metadata=GAME)
    assert value("countdown", task, said(text), wrong_result=0.3) == reward


def test_countdown_needs_numbers_and_takes_the_target_from_the_answer() -> None:
    assert value("countdown", Task.ask("?", "24"), said("24")) is None
    task = Task.ask("?", "5", metadata={"nums": [2, 3]})
    assert value("countdown", task, said("2+3=5")) == 1.0


@pytest.mark.parametrize("length", [0, 1, 79, 80, 81, 90, 99, 100, 101, 500])
def test_overlong_is_dapos_equation(length: int) -> None:
    most, cache = 100, 20  # an independent reading of arXiv:2503.14476, equation 13
    if length <= most - cache:
        expected = 0.0
    elif length <= most:
        expected = ((most - cache) - length) / cache
    else:
        expected = -1.0
    row = said(token_ids=[1] * (length + 7), loss_mask=[False] * 7 + [True] * length)
    given = value("overlong", Task.ask("?"), row, max_tokens=most, cache=cache)
    assert given is not None
    assert math.isclose(given, expected, abs_tol=1e-12)
    by_prompt = said(token_ids=[1] * (length + 7), prompt_length=7)
    assert value("overlong", Task.ask("?"), by_prompt, max_tokens=most, cache=cache) == given


def test_overlong_of_text_is_null_and_not_zero() -> None:
    assert value("overlong", Task.ask("?"), said("long"), max_tokens=2, cache=1) is None


ROME = {"name": "weather", "arguments": {"city": "Rome", "days": 1}}
OSLO = {"name": "weather", "arguments": {"city": "Oslo", "days": 1}}


def called(*calls: Any) -> Experience:
    wrapped = [{"type": "function", "function": c} for c in calls]
    return said(messages=[{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": wrapped}])  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("calls", "by_order"),
    [
        ([ROME, OSLO], (1.0, 1.0, 1.0)),
        ([OSLO, ROME], (0.0, 1.0, 1.0)),
        ([ROME, OSLO, ROME], (0.0, 0.0, 1.0)),
        ([ROME], (0.0, 0.0, 0.0)),
        ([], (0.0, 0.0, 0.0)),
        ([ROME, {**OSLO, "name": "wether"}], (0.0, 0.0, 0.0)),
        ([ROME, {**OSLO, "arguments": '{"days": 1.0, "city": "Oslo"}'}], (1.0, 1.0, 1.0)),
        ([ROME, {**OSLO, "arguments": {"city": "Oslo", "days": "1"}}], (0.0, 0.0, 0.0)),
        ([ROME, {**OSLO, "arguments": {"city": "Oslo", "days": True}}], (0.0, 0.0, 0.0)),
        ([ROME, {**OSLO, "arguments": "{city"}], (0.0, 0.0, 0.0)),
        ([ROME, {"arguments": {}}], (0.0, 0.0, 0.0)),
    ],
)
def test_tool_calls_are_compared_as_json(calls: list[Any], by_order: tuple[float, ...]) -> None:
    task = Task.ask("?", metadata={"tool_calls": [ROME, OSLO]})
    orders = ("same", "any", "contains")
    made = tuple(value("tool_call_match", task, called(*calls), order=o) for o in orders)
    assert made == by_order


def test_tool_calls_are_read_from_text_and_not_from_the_tasks_own_messages() -> None:
    history = [
        {"role": "assistant", "tool_calls": [{"function": OSLO}]},
        {"role": "user", "content": "and Rome?"},
    ]
    task = Task(messages=history, answer=json.dumps([{"function": ROME}]))
    text = f"I look.\n<tool_call>\n{json.dumps(ROME)}\n</tool_call>"
    row = said(messages=[*history, {"role": "assistant", "content": text}])
    assert value("tool_call_match", task, row) == 1.0
    assert value("tool_call_match", Task.ask("?", "no JSON"), row) is None
    deep = said(f"<tool_call>{'[' * 10**5}</tool_call>")
    assert value("tool_call_match", task, deep) == 0.0  # not NULL: it is no way out of a penalty


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("1/2", "#### 0.5", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        ("x(x+1)", r"\boxed{x^2+x}", 1.0),
        ("x(x+1)", r"\boxed{x^2+1}", 0.0),
        (r"\{1,2\}", r"\boxed{\{2, 1\}}", 1.0),
        (r"\sqrt{8}", r"$2\sqrt{2}$", 1.0),
        ("so 6*7=42\n#### 42", "It is\n#### 42.0", 1.0),
        ("1,234", "A: $1234", 1.0),
        ("10", "first 10, then 20 of them", 0.0),
        ("72", "no idea", 0.0),
        ("72", "", 0.0),
        ("Paris", "Paris", None),
        (None, "72", None),
    ],
)
def test_math_equivalence(answer: str | None, text: str, reward: float | None) -> None:
    assert value("math_equivalence", Task.ask("?", answer), said(text)) == reward


def test_math_equivalence_works_in_threads_and_ends_what_takes_too_long() -> None:
    began, seen = time.monotonic(), []
    product = r"\boxed{\prod_{k=1}^{99999} k^{k^k}}"
    tower = Task.ask("?", r"\boxed{\prod_{k=1}^{99998} k^{k^k}}"), said(product)

    def work() -> None:
        seen.append(value("math_equivalence", Task.ask("?", "1/2"), said("0.5")))
        with pytest.raises(TimeoutError, match=r"not compared within 0.5 s"):
            value("math_equivalence", *tower, seconds=0.5)
        seen.append(value("math_equivalence", Task.ask("?", "1/2"), said("0.25")))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [1.0, 0.0]
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"overlong": {"max_tokens": 5}}, "the reward `overlong` needs `cache`"),
        ("overlong", "needs `max_tokens`, `cache`; write `{overlong: {max_tokens: ...}}`"),
        ({"overlong": {"max_token": 5}}, "no parameter `max_token`; did you mean `max_tokens`"),
        (
            {"overlong": {"max_tokens": "5", "cache": 1}},
            "got '5' (str): input should be a valid integer",
        ),
        ({"overlong": {"max_tokens": 5, "cache": 0}}, "should be greater than 0"),
        ({"exact_match": {"strict": True}}, "`strict`; it has no parameters"),
        ({"tool_call_match": {"order": "some"}}, "parameter `order`"),
        ("overlon", "no reward `overlon`; did you mean `overlong`"),
        ("Verdict", "no reward `Verdict`"),
    ],
)
def test_a_reward_used_wrongly_says_how(spec: Any, message: str) -> None:
    with pytest.raises(OperatorError) as caught:
        reward_of(spec)
    assert message in str(caught.value)


def test_a_cache_above_the_most_tokens_is_refused() -> None:
    with pytest.raises(OperatorError, match="expected at most `max_tokens`, 5"):
        value(
            "overlong", Task.ask("?"), said(token_ids=[1], prompt_length=0), max_tokens=5, cache=6
        )


def test_parameters_of_users_own_rewards_are_their_keywords() -> None:
    def mine(task: Task, experience: Experience, scale: float = 1.0, **rest: float) -> float:
        return scale + sum(rest.values())

    assert with_parameters("mine", mine, {"scale": 2.0, "more": 1.0})(None, None) == 3.0


def test_every_reward_has_an_example_and_takes_a_task_and_a_try() -> None:
    for name in rewards.__all__:
        assert ">>> " in (getattr(rewards, name).__doc__ or "") or name == "Verdict", name
