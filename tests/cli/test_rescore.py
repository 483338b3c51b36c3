"""`rlake rescore`: another reward for stored rows, beside the one that they have."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.builders import experiences, task
from support.commands import Command, refused

from rlake.operators import rewards, score
from rlake.operators.source_digest import digest
from rlake.pipelines import rescoring
from rlake.store import Store, Task

MINE = """
def lenient(task, experience):
    if experience.rollout_index == 3:
        raise ValueError("no opinion on the last")
    return None if experience.rollout_index == 2 else 0.5 + len(task.metadata or {})
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
        "exact_match@7 scored 12 rows",
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
    assert "could not be scored: 3 rows, such as: ValueError: no opinion" in done.stdout
    assert verdicts(tried) == [
        (0.5, None, 6),
        (None, "ValueError: no opinion on the last (my_rewards.py:4)", 3),
        (None, None, 3),
    ]


def test_rows_that_were_judged_before_are_passed_over(rlake: Command, tried: Store) -> None:
    first = rlake("rescore", "--reward", "exact_match", "--where", "rollout_index < 2", "--json")
    assert json.loads(first.stdout)["new"] == 6
    rest = json.loads(rlake("rescore", "--reward", "exact_match", "--json").stdout)
    assert (rest["rows"], rest["new"]) == (12, 6)
    told = rlake("rescore", "--reward", "exact_match").stdout
    assert "scored 12 rows (12 before)" in told
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
        (("--reward", "my_rewards:nothing"), "`my_rewards` has no `nothing`"),
        (("--reward", "exact_match", "--where", "rewrad > 0"), "`rewrad`"),
        (("--reward", "exact_match", "--where", "1 = 1; SELECT 1"), "does not parse"),
    ):
        refused(rlake("rescore", *words), told)
    assert tried.count("scores") == 0


def test_nothing_to_judge_is_said(rlake: Command, tried: Store) -> None:
    refused(
        rlake("rescore", "--reward", "exact_match", "--where", "reward > 9"),
        "nothing was scored: no experience matches `--where` reward > 9",
        code=1,
    )


SLOW = """
import sys, time
import rlake
from rlake.pipelines import rescoring
from rlake.operators.reward_protocol import of_group

rescoring._ROWS = rescoring._ROWS_WAITED_FOR = 20

def slow(task, experience):
    time.sleep(0.01)
    return 1.0

@of_group
async def slow_group(task, experiences):
    time.sleep(0.04)
    return [float(len(experiences))] * len(experiences)

if __name__ == "__main__":
    rescoring.rescore(rlake.connect(sys.argv[1]), sys.argv[2], version="1")
"""


@pytest.mark.slow  # 4 s each: it starts a Python that loads us
@pytest.mark.parametrize("name", ["slow", "slow_group"])
def test_a_process_that_was_really_killed_is_gone_on_with_where_it_stood(
    name: str, rlake: Command, lake: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.append("experiences", experiences(600))
    (tmp_path / "slow_rewards.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    command = [sys.executable, "slow_rewards.py", lake.uri, f"slow_rewards:{name}"]
    judging = subprocess.Popen(command, cwd=tmp_path)
    until = time.monotonic() + 200
    while not lake.count("scores") and time.monotonic() < until:
        time.sleep(0.01)
    judging.kill()
    judging.wait()
    before = lake.count("scores")
    assert 0 < before < 600, "it was killed on its way"
    assert before % 20 == 0, "parts are stored whole, groups too"
    told = rlake("rescore", "--reward", f"slow_rewards:{name}", "--version", "1", "--json")
    done = json.loads(told.stdout)
    assert (done["rows"], done["new"]) == (600, 600 - before)
    expected = {"slow": 1.0, "slow_group": 4.0}[name]
    assert verdicts(lake) == [(expected, None, 600)]


GROUP = """
from rlake.operators.reward_protocol import Verdict, of_group

@of_group
async def ranked(task, experiences, *, best: float = 1.0):
    if experiences[0].group_id == "g001":
        raise TimeoutError("the judge is away")
    return [Verdict(best if e.reward else 0.0, f"of {len(experiences)}") for e in experiences]
"""


def test_a_judge_of_groups_sees_them_whole_and_fails_by_group(
    rlake: Command, lake: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "group_rewards.py").write_text(GROUP)
    monkeypatch.syspath_prepend(tmp_path)
    lake.append("experiences", experiences(12, reward=[1.0, 0.0, 0.0, 0.0]))
    spec = "'group_rewards:ranked': {best: 2.0}"
    first = rlake(
        "rescore", "--reward", spec, "--version", "1", "--where", "rollout_index < 2", "--json"
    )
    assert json.loads(first.stdout)["new"] == 6, "only rows that were asked for are stored"
    assert verdicts(lake) == [
        (0.0, "of 4", 2),
        (2.0, "of 4", 2),
        (None, "TimeoutError: the judge is away (group_rewards.py:7)", 2),
    ]
    rest = rlake("rescore", "--reward", spec, "--version", "1", "--json")
    assert json.loads(rest.stdout)["new"] == 6


def test_rescoring_has_the_name_and_version_that_the_operator_has(
    rlake: Command, tried: Store
) -> None:
    spec: dict[str, Any] = {"overlong": {"max_tokens": 9, "cache": 3}}
    done = json.loads(rlake("rescore", "--reward", json.dumps(spec), "--json").stdout)
    joined = (
        "SELECT e.*, t.answer FROM experiences e JOIN tasks t USING (task_id) ORDER BY ALL LIMIT 1"
    )
    [row] = score(reward=spec)(tried.sql(joined).pl()).to_dicts()
    assert (done["scorer"], done["version"]) == (row["scorer"], row["scorer_version"])
    other = json.dumps({"overlong": {"max_tokens": 9, "cache": 4}})
    assert json.loads(rlake("rescore", "--reward", other, "--json").stdout)["version"] != done["version"]  # fmt: skip  # noqa: E501


def test_a_reward_that_can_judge_no_row_is_a_failure_and_says_why(
    rlake: Command, tried: Store
) -> None:
    refused(
        rlake("rescore", "--reward", "json:loads"),
        "`loads` scored none of 12 rows, such as: TypeError",
        code=1,
    )


def test_half_a_character_in_a_reason_is_stored_as_a_question_mark(
    rlake: Command, tried: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("my_rewards.lenient", lambda *_: rewards.Verdict(1.0, "well\ud83d"))
    assert rlake("rescore", "--reward", "my_rewards:lenient").returncode == 0
    assert verdicts(tried) == [(1.0, "well?", 12)]


def told_apart(lake: Store, values: dict[str, list[float | None]]) -> None:
    """Store three groups of four tries, with verdicts of scorers beside their rewards."""
    lake.append("experiences", experiences(12, reward=values.pop("reward")))
    for scorer, said in values.items():
        lake.append(
            "scores",
            [
                {
                    "experience_id": f"g{i // 4:03d}/{i % 4:02d}",
                    "scorer": scorer,
                    "scorer_version": "1",
                    "value": one,
                }
                for i, one in enumerate(said)
            ],
        )


OLD = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, None]
NEW = [0.0, 1.0, 0.0, 0.0, 1.0, 0.5, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]


def test_the_difference_of_two_rewards_is_one_command(rlake: Command, lake: Store) -> None:
    told_apart(lake, {"reward": [*OLD], "strict": [*NEW]})
    told = json.loads(rlake("rewards", "diff", "reward", "score:strict@1", "--json").stdout)
    assert {k: told["rows"][k] for k in ("rows", "both", "changed", "higher", "lower")} == {
        "rows": 12,
        "both": 11,
        "changed": 5,
        "higher": 1,
        "lower": 3,
    }
    assert told["rows"]["a_mean"] == pytest.approx(6 / 11)
    assert told["rows"]["b_mean"] == pytest.approx(4.5 / 11)
    assert told["groups"] == {
        "groups": 3,
        "sign_changes": 1,
        "rows_of_other_sign": 2,
        "other_best": 1,
        "become_flat": 1,
        "become_informative": 1,
    }
    cells = {(c["a"], c["b"]): c["rows"] for c in told["confusion"]}
    assert cells == {
        ("NULL", "1.0"): 1,
        ("0.0", "0.0"): 4,
        ("0.0", "1.0"): 1,
        ("1.0", "0.0"): 2,
        ("1.0", "0.5"): 1,
        ("1.0", "1.0"): 3,
    }
    assert [(t["a_mean"], t["b_mean"]) for t in told["tasks"]] == [
        (pytest.approx(1 / 3), 0.0),
        (1.0, 0.875),
        (0.25, 0.25),
    ]
    words = rlake("rewards", "diff", "reward", "score:strict@1", "--rows", "2").stdout
    assert "5 change, 1 rise, 3 fall" in words
    assert "in 1 an advantage changes its sign (2 rows)" in words
    assert "rows that change most" in words


def test_rescore_compares_with_an_older_verdict(rlake: Command, lake: Store) -> None:
    told_apart(lake, {"reward": [*OLD], "strict": [*NEW]})
    words = ("rescore", "--reward", "exact_match", "--version", "1", "--compare", "score:strict")
    told = rlake(*words).stdout
    assert "from A = score:strict to B = score:exact_match@1" in told
    assert json.loads(rlake(*words, "--json").stdout)["difference"]["rows"]["rows"] == 12


def test_the_same_reward_differs_in_nothing(rlake: Command, lake: Store) -> None:
    told_apart(lake, {"reward": [*OLD], "same": [*OLD], "flat": [0.5] * len(OLD)})
    told = json.loads(rlake("rewards", "diff", "reward", "score:same", "--json").stdout)
    assert told["rows"]["changed"] == 0
    flat = json.loads(rlake("rewards", "diff", "reward", "score:flat", "--json").stdout)
    assert flat["rows"]["correlation"] is None  # and not NaN, which is no JSON
    assert (told["groups"]["sign_changes"], told["tasks"]) == (0, [])


def test_a_difference_used_wrongly_says_how(rlake: Command, lake: Store) -> None:
    told_apart(lake, {"reward": [*OLD], "strict": [*NEW]})
    for words, message in (
        (("reward", "score:strct"), "did you mean `strict`"),
        (("reward", "score:strict@2"), "of version `2`"),
        (("reward", "strict"), "`strict` is not a reward"),
        (("rewrd", "reward"), "`rewrd` is not a reward; did you mean `reward`?"),
        (("reward", "feedback:label"), "is text"),
        (("reward", "score:strict", "--where", "rewrd > 1"), "`rewrd`"),
    ):
        refused(rlake("rewards", "diff", *words), message)
    for words, message in (
        ("[1, 2]", "must be a name or"),
        ("{exact_match", "is not valid YAML"),
        ("overlong: {max_tokens: 5, cach: 1}", "no parameter `cach`"),
        ("overlong: 5", "must be a name or"),
    ):
        assert message in rlake("rescore", "--reward", words).stderr


def test_all_rewards_are_listed_with_their_parameters(rlake: Command) -> None:
    listed = json.loads(rlake("rewards", "list", "--json").stdout)
    assert set(listed) == set(rewards.__all__) - {"Verdict"}
    assert listed["overlong"]["parameters"] == ["max_tokens", "cache"]
    assert listed["ruler"]["looks_at"] == "group"
