"""Rewards as plain functions, and applied over stored rows."""

import json
import sys
from pathlib import Path

import polars as pl
import pytest
from support.builders import experiences, line_of, rows

from rlake.operators import score
from rlake.operators.rewards import (
    Verdict,
    calibrated_answer,
    exact_match,
    math_equivalence,
    numeric_answer,
)
from rlake.operators.scoring import score_rows
from rlake.store import Experience, Task
from rlake.store.errors import OperatorError

SHARED = Path(__file__).parents[3] / "shared"
SOLUTIONS = SHARED / "data/gsm8k/example_model_solutions.jsonl"


def said(text: str | None) -> Experience:
    return Experience(task_id="t", response_text=text)


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("4", " 4\n", 1.0),
        ("4", "5", 0.0),
        ("4", "It is 4", 0.0),
        ("4", None, 0.0),
        (None, "4", None),
    ],
)
def test_exact_match(answer: str | None, text: str | None, reward: float | None) -> None:
    assert exact_match(Task.ask("2+2=", answer), said(text)) == reward


@pytest.mark.parametrize("q", [0.0, 0.25, 0.9, 1.0])
@pytest.mark.parametrize(("answer", "correct"), [("4", 1.0), ("5", 0.0)])
def test_a_calibrated_answer_is_worth_its_correctness_less_the_brier_score(
    q: float, answer: str, correct: float
) -> None:
    text = f"<answer> {answer} </answer><confidence>{q}</confidence>"
    value = calibrated_answer(Task.ask("2+2=", "4"), said(text))
    assert value == pytest.approx(correct - (q**2 - 2 * q * correct + correct), abs=1e-15)


@pytest.mark.parametrize("told", ["", "often", "1.5", "-0.1", "nan"])
def test_an_answer_without_a_confidence_is_worth_the_least(told: str) -> None:
    value = calibrated_answer(
        Task.ask("2+2=", "4"), said(f"<answer>4</answer><confidence>{told}</confidence>")
    )
    assert isinstance(value, Verdict)
    assert value.value == -1.0
    assert calibrated_answer(Task.ask("2+2="), said("4")) is None


def test_a_true_confidence_is_the_best_one_to_state() -> None:
    task, grid = Task.ask("2+2=", "4"), [i / 20 for i in range(21)]

    def expected(q: float, rate: float) -> float:
        right, wrong = (
            calibrated_answer(task, said(f"<answer>{a}</answer><confidence>{q}</confidence>"))
            for a in ("4", "5")
        )
        assert isinstance(right, float)
        assert isinstance(wrong, float)
        return rate * right + (1 - rate) * wrong

    for rate in (0.1, 0.5, 0.85):
        assert max(grid, key=lambda q: expected(q, rate)) == pytest.approx(rate)


def test_the_last_assistant_message_is_what_was_answered() -> None:
    messages = [
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "4"},
        {"role": "tool", "content": "7"},
    ]
    spoken = Experience(task_id="t", messages=messages, response_text="5")
    assert exact_match(Task.ask("2+2=", "4"), spoken) == 1.0


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("48/2 = 24\n#### 72", "so 24+48\n#### 72", 1.0),
        ("#### 72", "The answer is 72.", 1.0),
        ("#### 72", "#### $72.00", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### 1234", "A: 1,234", 1.0),
        ("#### -3", "it falls to -3 degrees", 1.0),
        ("#### -3", "#### \N{MINUS SIGN}3", 1.0),
        ("#### 3", "it falls to -3 degrees", 0.0),
        ("#### 50", "#### 50%", 1.0),
        ("#### 50%", "50", 1.0),
        ("#### .5", "0.50", 1.0),
        ("#### 72", "#### 72\nThere are 10 more.", 1.0),
        ("#### 72", "A: 70\nNo.\nA: 72", 1.0),
        ("#### 4", "10-6 leaves 4", 1.0),
        ("#### 6", "it was 10-6", 1.0),
        ("#### 5", "--5", 0.0),
        ("#### -5", "it is +-5, or -$-5", 1.0),
        ("#### 72", "no idea", 0.0),
        ("#### 72", "", 0.0),
        ("#### 72", None, 0.0),
        ("#### 72", "72000", 0.0),
        ("#### 2345", "options 1,2345", 1.0),
        ("seventy", "72", None),
        (None, "72", None),
    ],
)
def test_numeric_answer(answer: str | None, text: str | None, reward: float | None) -> None:
    assert numeric_answer(Task.ask("How many?", answer), said(text)) == reward


@pytest.mark.skipif(not SOLUTIONS.exists(), reason="needs the data of ../shared")
def test_numeric_answer_agrees_with_the_judgment_of_every_published_solution() -> None:
    judged, told = [], []
    for line in SOLUTIONS.read_text().splitlines():
        row = json.loads(line)
        task = Task.ask(row["question"], row["ground_truth"])
        for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            judged.append(float(row[model]["is_correct"]))
            told.append(numeric_answer(task, said(row[model]["solution"])))
    assert len(judged) == 4 * 1319
    assert told == judged


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_math_equivalence_agrees_with_the_labels_of_real_solutions(
    every: int, gsm8k: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The labels compare final numbers; mathematics may add other ways of writing them, no more."""
    rows, labels = [], []
    for line in (gsm8k / "example_model_solutions.jsonl").read_text().splitlines()[::every]:
        row = json.loads(line)
        for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            said = row[model]["solution"]
            rows.append({"task_id": "t", "answer": row["ground_truth"], "response_text": said})
            labels.append(float(row[model]["is_correct"]))
    differ = [
        (label, scored, row["answer"][-30:], row["response_text"][-60:])
        for label, scored, row in zip(labels, score_rows(math_equivalence, rows), rows, strict=True)
        if scored[0][0] != label
    ]
    agreement = 1 - len(differ) / len(rows)
    with capsys.disabled():
        sys.stdout.write(f"\n{agreement:.2%} of {len(rows):,} labels agree {differ or ''}\n")
    assert agreement >= 0.99, differ


def picky(task: Task, experience: Experience) -> float | None:
    if experience.response_text == "no idea":
        raise LookupError(f"cannot judge {task.answer}")
    return {"0": None, "2": float("nan")}.get(str(task.answer), 0.5)


def test_score_keeps_the_error_of_a_row_and_goes_on() -> None:
    frame = rows(experiences(4, reward=(1.0, 0.0, 1.0, 1.0), group_size=1))
    frame = frame.with_columns(answer=pl.Series(["0", "1", "2", "3"]))
    judged = score(reward=picky, scorer_version="7")(frame)
    assert judged["reward"].to_list() == [None, None, None, 0.5]
    assert judged["detail"].to_list() == [
        None,
        f"LookupError: cannot judge 1 {line_of(__file__, 'cannot judge')}",
        "the reward is nan, expected a finite number or None",
        None,
    ]
    assert judged["scorer_version"].unique().to_list() == ["7"]


def test_score_gives_the_reward_the_conversation_of_the_task() -> None:
    def asks(task: Task, experience: Experience) -> float | None:
        return float(len(task.messages[0]["content"]))

    frame = rows(experiences(1)).with_columns(
        answer=pl.lit("4"), task_messages=pl.lit('[{"role": "user", "content": "2+2="}]')
    )
    assert score(reward=asks)(frame)["reward"].to_list() == [4.0]


def test_score_needs_the_answer_and_a_reward_that_is_there() -> None:
    with pytest.raises(
        OperatorError,
        match=r"`answer`, which is not there; join the tasks in the source: `SELECT e\.\*, t\.ans",
    ):
        score()(rows(experiences(1)))
    with pytest.raises(OperatorError, match="no reward `exact_mach`; did you mean `exact_match`"):
        score(reward="exact_mach")
