"""`rlake rescore`: another reward for stored rows, beside the one that they have."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from builders import experiences, task

from rlake.loop import rescoring
from rlake.operators import rewards
from rlake.operators.provenance import digest
from rlake.store import Store, Task

Command = Callable[..., CompletedProcess[str]]

MINE = """
def lenient(task, experience):
    if experience.rollout == 3:
        raise ValueError("no opinion on the last")
    return None if experience.rollout == 2 else 0.5 + len(task.metadata or {})
"""


@pytest.fixture
def tried(lake: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Twelve tries at three tasks, the second of which is not stored; and a reward of a user's."""
    (tmp_path / "my_rewards.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rescoring, "_ROWS", 5)
    lake.append("tasks", [task(0)])
    lake.append("experiences", experiences(12, reward=[1.0, 0.0, 0.0, None]))
    return lake


def verdicts(lake: Store) -> list[tuple[object, ...]]:
    return lake.sql(
        "SELECT value, detail, count(*) FROM scores GROUP BY ALL ORDER BY ALL NULLS LAST"
    ).fetchall()


def test_a_reward_of_ours_judges_all_rows_and_says_what_changed(
    rlake: Command, tried: Store
) -> None:
    done = rlake("rescore", "--reward", "exact_match", "--version", "7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "exact_match@7 judged 12 rows",
        # fourth tries have a reward now, and those at the task that is not stored have none
        "against the stored reward: 5 changed (41.7%), 0 higher, 0 lower",
        "mean: 0.3333 stored, 0.25 now",
        "read it as `score:exact_match@7`",
    ]
    again = tried.scan("experiences", with_columns=["reward=score:exact_match@7"]).collect()
    assert sum(again["reward"].drop_nulls()) == 2.0
    assert [c for (c,) in tried.sql("SELECT sum(reward) FROM experiences").fetchall()] == [3.0]


def test_a_row_that_cannot_be_judged_stops_nothing_and_says_why(
    rlake: Command, tried: Store
) -> None:
    done = rlake("rescore", "--reward", "my_rewards:lenient")
    assert "could not be judged: 3 rows, such as: ValueError: no opinion" in done.stdout
    assert verdicts(tried) == [
        (0.5, None, 6),
        (None, "ValueError: no opinion on the last", 3),
        (None, None, 3),
    ]


def test_rows_that_were_judged_before_are_passed_over(rlake: Command, tried: Store) -> None:
    first = rlake("rescore", "--reward", "exact_match", "--where", "rollout < 2", "--json")
    assert json.loads(first.stdout)["new"] == 6
    rest = json.loads(rlake("rescore", "--reward", "exact_match", "--json").stdout)
    assert (rest["rows"], rest["new"]) == (12, 6)
    told = rlake("rescore", "--reward", "exact_match").stdout
    assert "judged 12 rows (12 before)" in told
    assert tried.count("scores") == 12


def test_a_call_that_was_killed_is_gone_on_with(
    rlake: Command, tried: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rescoring.rescore(tried, "exact_match", listener=killed)
    assert tried.count("scores") == 5, "what was judged is stored"
    rest = json.loads(rlake("rescore", "--reward", "exact_match", "--json").stdout)
    assert (rest["rows"], rest["new"]) == (12, 7)


def test_the_version_is_a_digest_of_the_source_when_none_is_given(
    rlake: Command, tried: Store
) -> None:
    done = json.loads(rlake("rescore", "--reward", "exact_match", "--json").stdout)
    assert done["version"] == digest(rewards.exact_match)


def test_a_reward_sees_the_whole_task(rlake: Command, tried: Store) -> None:
    rich = Task.ask("1+1=", "2", metadata={"hard": True})
    [row] = experiences(1, task_id=rich.task_id, experience_id="rich/00", group_id="rich")
    tried.append("tasks", [rich])
    tried.append("experiences", [row])
    rlake("rescore", "--reward", "my_rewards:lenient", "--where", "group_id = 'rich'")
    assert verdicts(tried) == [(1.5, None, 1)]


def test_rescore_used_wrongly_says_how(rlake: Command, tried: Store) -> None:
    for words, told in (
        (("--reward", "exact_mach"), "did you mean `exact_match`"),
        (("--reward", "my_rewards:nothing"), "there is no reward `my_rewards:nothing`"),
        (("--reward", "exact_match", "--where", "rewrad > 0"), "`rewrad`"),
        (("--reward", "exact_match", "--where", "1 = 1; SELECT 1"), "does not parse"),
    ):
        done = rlake("rescore", *words)
        assert (done.returncode, done.stdout) == (2, ""), words
        assert told in done.stderr
    assert tried.count("scores") == 0


def test_nothing_to_judge_is_said(rlake: Command, tried: Store) -> None:
    done = rlake("rescore", "--reward", "exact_match", "--where", "reward > 9")
    assert done.returncode == 0
    assert "judged 0 rows" in done.stdout


def test_a_reward_that_can_judge_no_row_is_a_failure_and_says_why(
    rlake: Command, tried: Store
) -> None:
    done = rlake("rescore", "--reward", "json:loads")
    assert (done.returncode, done.stdout) == (1, "")
    assert "`loads` could judge none of 12 rows, such as: TypeError" in done.stderr
