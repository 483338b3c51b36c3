"""`rlake audit oddities`: planted hacking and odd texts are found, a run without is silent."""

from datetime import timedelta
from typing import Any

import pytest
from support.histories import SEEDS, START, History, Row

from rlake.loop.audits import oddities
from rlake.store import Store
from rlake.store.errors import JobError, NotFoundError

Score = dict[str, Any]


def scores(history: History, value: Any) -> list[Score]:
    """Score each row by a stricter scorer."""
    return [
        {
            "experience_id": row["experience_id"],
            "scorer": "strict",
            "scorer_version": "1",
            "value": float(value(row)),
            "created_at": START + timedelta(days=1),
        }
        for row in history.rows
    ]


def is_late(row: Row) -> bool:
    return row["batch"] > 10


def leaking(seed: int) -> tuple[History, list[Score]]:
    """From the middle on, half of the failures are rewarded; the stricter scorer knows."""
    history = History(seed)
    truth = {row["experience_id"]: row["reward"] for row in history.rows}
    history.change(lambda r: is_late(r) and history.rng.random() < 0.6, reward=1.0)
    return history, scores(history, lambda r: truth[r["experience_id"]])


def learning(seed: int, run_id: str = "r") -> tuple[History, list[Score]]:
    """The reward rises, and the stricter scorer, which is noisy, rises with it."""
    history = History(seed, run_id=run_id)
    history.change(lambda r: is_late(r) and history.rng.random() < 0.6, reward=1.0)
    return history, scores(history, lambda r: r["reward"] * 0.8 + history.rng.normal(0, 0.2))


def written(store: Store, made: tuple[History, list[Score]]) -> Store:
    history, judged = made
    history.write(store)
    store.append("scores", judged)
    return store


def check_leak(store: Store, seed: int) -> None:
    found = oddities(written(store, leaking(seed)), "r").findings
    assert len(found) == 1
    assert found[0].startswith("the reward rose by")
    assert "score strict" in found[0]


def test_a_reward_that_a_stricter_score_does_not_follow_is_found(store: Store) -> None:
    check_leak(store, seed=0)


def test_a_run_that_learns_has_no_oddities(store: Store) -> None:
    found = oddities(written(store, learning(0)), "r")
    assert found.findings == []
    assert found.judgments[0]["change"] > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_leaks_are_found_and_learning_is_not_at_every_seed(seed: int, store: Store) -> None:
    check_leak(store, seed)
    assert oddities(written(store, learning(seed, run_id="clean")), "clean").findings == []


def test_length_that_is_rewarded_is_found(store: Store) -> None:
    history = History(1)
    history.change(is_late, num_tokens=lambda r: r["num_tokens"] + int(history.rng.integers(0, 60)))
    history.change(is_late, reward=lambda r: float(r["num_tokens"] > 55))
    [found] = oddities(history.write(store), "r").findings
    assert found.startswith("longer answers are rewarded: within groups, reward and length correl")


ODD: dict[str, dict[str, Any]] = {
    "repeated text": {"response_text": "The answer is obviously correct.", "reward": 1.0},
    "repetition": {"response_text": "so so we get " * 30},
    "other script": {"response_text": "the answer 答案是四 so it is 4"},
    "empty thought": {"response_text": lambda r: f"<think>\n\n</think> {r['response_text']}"},
    "empty answer": {"response_text": " ", "reward": 1.0},
}


def test_each_odd_text_is_found_once_and_by_its_name(store: Store) -> None:
    history = History(2, groups=20)
    for number, columns in enumerate(ODD.values()):
        end = f"{number:04d}"
        history.change(lambda r, end=end: is_late(r) and r["group_id"].endswith(end), **columns)
    found = oddities(history.write(store), "r")
    told = {finding.split(" (")[0] for finding in found.findings}
    # a text that is repeated, or has another script, does so in several tasks
    assert told == set(ODD)
    shares = {row["oddity"]: (row["early"], row["late"], row["groups"]) for row in found.odd}
    assert shares["empty answer"] == (0.0, pytest.approx(1 / 20), 10)
    assert shares["empty thought"] == (0.0, pytest.approx(1 / 20), 10)


def test_answers_outside_the_tags_and_agreement_on_a_wrong_one_are_found(store: Store) -> None:
    history = History(3)

    def text(row: Row) -> str:
        return f"<answer>{int(history.rng.integers(0, 100))}</answer>"

    history.change(lambda r: not r["group_id"].endswith("3"), response_text=text)
    history.change(lambda r: r["group_id"].endswith("3"), reward=1.0)
    history.change(
        lambda r: r["group_id"].endswith("5"),
        response_text=lambda r: f"{r['rollout_index']} <answer>7</answer>",
        reward=0.0,
    )
    found = oddities(history.write(store), "r")
    assert [f.split(" (")[0].split(" of the later")[0] for f in found.findings] == [
        "outside the tags",
        "12.5 %",
    ]
    assert "groups agree on a wrong answer" in found.findings[1]


def test_unknown_runs_and_runs_without_rows_say_so(store: Store) -> None:
    with pytest.raises(NotFoundError, match="no run `r`"):
        oddities(store, "r")
    history = History(4, steps=1, groups=1)
    history.change(lambda _: True, purpose="eval")
    history.write(store)
    with pytest.raises(JobError, match="has sampled no row"):
        oddities(store, "r")


def test_odd_texts_are_those_of_the_audit(store: Store) -> None:
    history = History(2, groups=20)
    texts = {
        "is_repetitive(response_text)": "so so we get " * 30,
        "has_other_script(response_text, prompt_text)": "it is \u7b54\u6848\u662f\u56db, so 4",
        "has_empty_thought(response_text)": "<think>\n\n</think> 4",
    }
    for number, text in enumerate(texts.values()):
        end = f"{number:04d}"
        history.change(lambda r, end=end: r["group_id"].endswith(end), response_text=text)
    history.write(store)
    shares = {row["oddity"]: row["late"] for row in oddities(store, "r").odd}
    flags = store.sql(
        f"SELECT {', '.join(f'avg({call}::INT)' for call in texts)} FROM experiences "
        "WHERE run_id = 'r' AND batch > 10"
    ).fetchall()[0]
    names = ("repetition", "other script", "empty thought")
    assert flags == pytest.approx([shares[name] for name in names])
    assert flags == pytest.approx([1 / 20] * 3)
