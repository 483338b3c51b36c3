"""Tasks in a folder that are solved with bash, in the real sandbox, with InterCode's reward."""

import json
import math
from pathlib import Path

import pytest
from support.rollouts import rollouts
from support.text_games import played

from rlake.loop import cli
from rlake.loop.environments import bash
from rlake.loop.environments.bash import Outcome, compared
from rlake.loop.environments.environment import Step
from rlake.loop.environments.expert import episodes
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.recipes.toys import folder_chores
from rlake.operators.sandbox import protection
from rlake.store import Task, connect
from rlake.store.errors import JobError

isolated = pytest.mark.skipif(
    not protection().startswith("namespaces"), reason=f"no namespaces here: {protection()}"
)
FILES = {"notes/a.txt": "egg\njam\n", "notes/b.txt": "jam\n", "empty/": ""}


def chore(right: str, **about: object) -> Task:
    return Task.ask("Do it.", right, metadata={"bash": {"files": FILES, **about}})


def done(task: Task, *answers: str, **parameters: object) -> list[Step]:
    return played(bash(**parameters), task, [*answers])[1]


def test_commands_are_run_in_turn_where_the_last_one_went_and_judged_at_the_end() -> None:
    task = chore("sort -r notes/a.txt > notes/c.txt", setup="rm notes/b.txt; awk 1 notes/a.txt")
    said = ["I look.\n```bash\ncd notes\nls\n```", "<bash>sort -r a.txt > c.txt</bash>", "submit"]
    listed, wrote, last = done(task, *said)
    assert (listed.shown, wrote.shown, listed.reward) == ("a.txt", "(no output)", 0.0)
    assert (last.reward, last.is_done) == (1.0, True)
    parts = {"bash/files": 1.0, "bash/contents": 1.0, "bash/output": 1.0}
    assert last.metrics == {**parts, "environment/won": 1.0}


def test_a_command_that_is_ended_does_not_move_the_next_one() -> None:
    shown = done(chore("true"), "cd notes", "exec true", "pwd", "sleep 9", "pwd", seconds=0.5)
    assert [str(step.shown).rpartition("/")[2] for step in (shown[2], shown[4])] == ["notes"] * 2


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"c": "made file 1", "b": "gone"}, (1.0, 1.0)),
        ({"d": "made file 1", "b": "gone"}, (1 - math.erf(2), 1.0)),  # another name
        ({"c": "made file 2", "b": "gone"}, (1.0, 0.0)),  # another content
        ({"c": "made program 1", "b": "gone"}, (1.0, 0.0)),
        ({"c": "changed file 1"}, (1 - math.erf(3), 1.0)),  # in another way, and b is still there
        ({}, (1 - math.erf(2), 1.0)),
    ],
)
def test_what_changed_is_compared_by_its_ways_and_its_contents(
    changes: dict[str, str], parts: tuple[float, float]
) -> None:
    right = Outcome({"c": "made file 1", "b": "gone"}, "")
    made = compared(Outcome(changes, ""), right)
    assert (made["files"], made["contents"], made["output"]) == (*parts, 1.0)


def test_outputs_are_compared_by_tf_idf_as_scikit_learn_does() -> None:
    def output(one: str, other: str) -> float:
        return compared(Outcome({}, one), Outcome({}, other))["output"]

    idf = 1 + math.log(3 / 2)  # of a word of one text; 1 of a word of both
    assert output("egg jam", "jam") == pytest.approx(1 / math.sqrt(1 + idf**2), abs=1e-12)
    norms = math.sqrt(4 + idf**2) * math.sqrt(1 + idf**2)
    assert output("jam jam egg", "jam ham") == pytest.approx(2 / norms, abs=1e-12)
    assert (output("3\n", "4\n"), output("3\n", "3\n"), output("a", "")) == (0.0, 1.0, 0.0)


@pytest.mark.slow
def test_words_in_another_order_are_alike_but_no_solution() -> None:
    last = done(chore("cat notes/a.txt"), "sort -r notes/a.txt", max_steps=1)[-1]
    assert last.reward == pytest.approx(1.0)
    assert "environment/won" not in last.metrics


@isolated
@pytest.mark.slow
def test_a_command_that_does_harm_ends_alone_and_leaves_the_folder() -> None:
    said = [
        "sleep 600 & echo more >> notes/b.txt",  # what it leaves in the background ends with it
        "sleep 60",
        "kill -9 -1",
        "yes | head -c 9000000 > notes/big; how=$?; rm notes/big; exit $how",
        "chmod 000 notes/a.txt notes; yes | head -c 300",
        "cat /etc/passwd; ls /work/main.py /root; echo > /dev/tcp/127.0.0.1/80",
        "chmod 755 notes; cat notes/b.txt",
    ]
    steps = done(chore("true"), *said, seconds=0.6, longest=100)
    shown = [str(step.shown) for step in steps]
    assert shown[0] == "(no output)"
    assert shown[1].endswith("took longer than 0.6 s.")
    assert shown[2] == "The command was ended: crash."
    assert steps[3].metrics == {"bash/errors": 1.0}  # 4 MB are what there is
    assert shown[4].endswith("y\n... 200 bytes more")
    assert "cannot open" in shown[5] or "No such file" in shown[5]
    assert shown[6] == "jam\nmore"
    assert steps[2].metrics == {"bash/errors": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Task.ask("?"), "must have `bash` in its metadata, and an answer"),
        (chore("true", files={"../x": ""}), "`../x` of task .* is not below the folder"),
        (chore("true", files={"a": "", "a/b": ""}), "cannot be made: error: .*a"),
        (chore("true", setup="cd nowhere"), "its setup ends with status 1: .*nowhere"),
        (chore("sleep 9"), "takes longer than `seconds`, 0.5"),
    ],
)
def test_a_task_that_cannot_be_made_is_refused_with_its_reason(task: Task, said: str) -> None:
    with pytest.raises(JobError, match=said):
        done(task, seconds=0.5)


@pytest.mark.slow
@pytest.mark.long
def test_the_expert_solves_every_kind_of_chore() -> None:
    tasks = list(folder_chores(count=200, held_out=40))
    kinds = {task.answer.split()[0]: task for task in tasks if task.answer}
    rows = episodes(list(kinds.values()), environment="bash")["experiences"]
    assert {row.reward for row in rows} == {1.0}
    assert len(kinds) >= 10
    assert [task.split for task in tasks].count("eval") == 40


def test_a_rollout_is_a_row_with_the_parts_of_its_reward() -> None:
    workflow = {"multi_turn": {"environment": {"bash": {"reward": "exact"}}}}
    policy = ScriptedPolicy(["wc -l < notes/a.txt", "submit"])
    [row] = rollouts(policy, workflow, chore("wc -l < notes/a.txt"))
    assert (row.reward, row.num_turns) == (1.0, 2)
    assert row.metrics["environment/won"] == 1.0


@pytest.mark.slow
def test_the_recipe_imitates_and_works_on_the_engine(tmp_path: Path) -> None:
    store = connect(tmp_path / "lake")
    tasks = {"rlake.loop.recipes.toys:folder_chores": {"count": 4, "held_out": 2}}
    short = [
        f"tasks.generator={json.dumps(tasks)}",
        "stages.imitate.trainer.steps=2",
        "evaluate.sampling.max_tokens=4",
    ]
    words = [word for text in short for word in ("--set", text)]
    assert cli.run_command(["run", "bash", "--store", store.uri, *words]) == 0
    rows = store.sql("SELECT count(*), min(reward) FROM experiences GROUP BY purpose ORDER BY 1")
    assert [row[0] for row in rows.fetchall()] == [2, 4]
