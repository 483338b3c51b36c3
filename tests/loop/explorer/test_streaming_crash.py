"""Pull the plug in an asynchronous run: what was finished stays, what was not is tried again."""

from pathlib import Path

import pytest
from support.jobs import kill_at, run_here, start

import rlake
from rlake.store import Store

SCHEDULE = "schedule={preset: asynchronous, max_ahead: 2, max_lag: 4}"

WRONG = {
    "trained on twice": """
        SELECT experience_id FROM draws_current GROUP BY experience_id HAVING count(*) > 1""",
    "too old": "SELECT experience_id FROM draws_current WHERE lag > 4 OR lag < 0",
    "chosen, and never tried": """
        SELECT s.task_id FROM task_selections s
        WHERE s.batch < (SELECT max(batch) FROM task_selections)
        AND NOT EXISTS (SELECT 1 FROM experiences e
            WHERE e.group_id = format('{}/{:06d}/{:04d}', s.run_id, s.batch, s.position))""",
    "a group that is not whole": """
        SELECT group_id FROM experiences GROUP BY group_id
        HAVING count(DISTINCT rollout_index) <> 4""",
    "written by weights that nobody published": """
        SELECT e.experience_id
        FROM (SELECT experience_id, unnest(segments) AS s, unnest(digests) AS d FROM experiences) e
        LEFT JOIN policies p ON p.policy_version = e.s.policy_version AND p.digest = e.d
        WHERE p.digest IS NULL""",
}
"""What must not be in a store, whatever was killed when."""


def wrong(lake: Store) -> dict[str, int]:
    """Return what is wrong, with how many rows."""
    found = {what: len(lake.sql(query).fetchall()) for what, query in WRONG.items()}
    return {what: count for what, count in found.items() if count}


@pytest.mark.slow
def test_a_killed_asynchronous_run_loses_no_finished_group_and_skips_no_task(
    tmp_path: Path,
) -> None:
    args = ["run", "small.yaml", "--store", "lake", "--set", SCHEDULE]
    for i, step in enumerate((4, 9)):
        process = start(tmp_path, *args, *(["--resume"] if i else []), last_batch=step + 2)
        kill_at(process, tmp_path / "lake", step=step)
    before = rlake.connect(tmp_path / "lake").scan("experiences").collect()
    run_here(tmp_path, SCHEDULE, resume=True)
    lake = rlake.connect(tmp_path / "lake")
    after = lake.scan("experiences").collect()
    assert before.equals(after.join(before.select("experience_id"), on="experience_id", how="semi"))
    assert wrong(lake) == {}
    assert lake.sql("SELECT count(DISTINCT step) FROM draws_current").fetchall() == [(16,)]

    planted = after.row(0, named=True)
    changes = {"experience_id": "demo/x", "group_id": "demo/x", "digests": ["0" * 32]}
    lake.append("experiences", [planted | changes])
    assert set(wrong(lake)) >= {"written by weights that nobody published"}
