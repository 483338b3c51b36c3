"""A small environment of the package verifiers, run through the policy as it is."""

import pytest
from support.rollouts import rollouts

from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.tasks.prepare import prepare_tasks, select
from rlake.store import Store


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_dataset_becomes_tasks_and_the_rubric_the_reward(store: Store) -> None:
    pytest.importorskip("verifiers")
    from rlake.loop.config import TasksConfig

    given = {"environment": "support.retries:again_until_right"}
    prepare_tasks(store, TasksConfig(generator={"verifiers_tasks": {**given, "taskset": "sums"}}))
    tasks = select(store, "taskset = 'sums' AND answer = '2'")
    assert [task.prompt_text for task in tasks] == ["1+1="]
    found = {}
    for answers in (("2",), ("3", "2"), ("3", "4")):
        [row] = rollouts(ScriptedPolicy(answers), {"verifiers": given}, tasks[0])
        found[answers] = row
        assert row.drop_reason is None
        assert sum(row.loss_mask or ()) == 2 * len(answers)  # a character and an end a turn
    assert [row.reward for row in found.values()] == [1.5, 1.0, 0.0]
    assert found["3", "2"].metrics["verifiers/right"] == 1.0
    assert [m["content"] for m in found["3", "2"].messages or ()] == ["1+1=", "3", "no", "2"]
