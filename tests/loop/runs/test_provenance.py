"""A run's record says which functions it used, and what their sources were."""

from support.tiny_models import config, share_of_ones

from rlake.loop.rollouts.setup import used_functions
from rlake.loop.runs.job import job, recorded
from rlake.loop.workflows import single_turn
from rlake.operators.source_digest import digest
from rlake.store import Store


def used(store: Store, name: str) -> dict[str, str] | None:
    functions = used_functions(config(), name)
    with (
        job(store, config(), name, resume=False, functions=functions) as mine,
        recorded(mine, start_step=1),
    ):
        pass
    found = store.sql(f"SELECT functions FROM job_events WHERE job = '{name}'").fetchall()
    assert found == [found[0]] * 2, "running and done say the same"
    return {f["name"]: f["value"] for f in found[0][0]} if found[0][0] else None


def test_jobs_that_try_tasks_record_workflow_and_rewards(store: Store) -> None:
    expected = {
        "workflow:single_turn": digest(single_turn),
        "reward:share_of_ones": digest(share_of_ones),
    }
    assert used(store, "explore") == used(store, "evaluate") == expected


def test_a_trainer_needs_none_of_them(store: Store) -> None:
    assert used(store, "train") is None
