"""`rlake check`: expectations of stored rows, from a file."""

import json
from pathlib import Path

from support.builders import experiences
from support.commands import Command

from rlake.store import Store

FILE = """
expect:
  tasks: [{unique: task_id}, {not_null: answer}]
  experiences:
    - {range: {reward: [0, 1]}, name: rewards are shares}
    - {accepted_values: {finish_reason: [stop]}, severity: warn}
  groups: [{not_null: reward_mean}]
"""


def test_a_file_of_expectations_is_checked_and_an_error_is_the_exit_code(
    rlake: Command, lake: Store
) -> None:
    lake.append("experiences", experiences(4, reward=1.0, finish_reason="length"))
    Path("expectations.yaml").write_text(FILE)
    done = rlake("check")
    assert done.returncode == 0, done.stderr
    assert "5 expectations checked, 1 failed" in done.stdout
    lake.append("experiences", experiences(8, reward=2.0)[4:])
    done = rlake("check", "--json")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert [r["such_as"] for r in told["results"] if not r["passed"]] == [
        ["g001/00", "g001/01", "g001/02", "g001/03"],
        ["g000/00", "g000/01", "g000/02", "g000/03"],
    ]
    assert lake.count("expectations") == 10


def test_wrong_files_are_refused(rlake: Command, lake: Store) -> None:
    for text, message in [
        ("expect: {taks: [{unique: task_id}]}", "did you mean `tasks`"),
        ("expect: {tasks: [{unique: tsk_id}]}", "did you mean `task_id`"),
        ("expect: {}", "has no expectations; write"),
        ("- 1", "has no expectations"),
        ("name: p\nsource: {table: tasks}\noperators: []\nexpect: {sink: [{unique: task_id}]}",
         "is a pipeline"),
    ]:  # fmt: skip
        Path("wrong.yaml").write_text(text)
        done = rlake("check", "wrong.yaml")
        assert done.returncode == 2, text
        assert message in done.stderr, done.stderr
    assert rlake("check").returncode == 2
