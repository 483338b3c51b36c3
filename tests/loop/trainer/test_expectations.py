"""`expect:` of runs: tasks are checked before the run, rows before each step."""

from pathlib import Path

import pytest
from support.tiny_models import config

import rlake
from rlake.loop.run import check, run
from rlake.store.errors import ConfigError, JobError


def test_a_run_does_not_train_on_rows_that_are_not_as_expected(tmp_path: Path) -> None:
    lake = rlake.connect(tmp_path / "lake")
    late = {"sql": "SELECT experience_id FROM rows WHERE policy_version >= 1", "name": "early"}
    expect = {"tasks": [{"row_count": {"min": 1}}], "experiences": [{"not_null": "reward"}, late]}
    with pytest.raises(JobError) as error:
        run(lake, config(trainer={"steps": 3, "batch_size": 2}, expect=expect))
    assert "`early` fails for the rows of step 2 of run" in str(error.value)
    assert "they are not trained on: fix the rows" in str(error.value)
    steps = lake.sql("SELECT DISTINCT step FROM draws ORDER BY 1").fetchall()
    assert steps == [(1,)]
    told = lake.sql(
        "SELECT step, name, passed, run_id IS NOT NULL FROM expectations ORDER BY 1 NULLS FIRST, 2"
    ).fetchall()
    assert told == [
        (None, 'row_count {"min": 1}', True, True),
        (1, "early", True, True),
        (1, "not_null reward", True, True),
        (2, "early", False, True),
        (2, "not_null reward", True, True),
    ]


def test_tasks_that_are_not_as_expected_stop_the_run_before_it_is_recorded(tmp_path: Path) -> None:
    lake = rlake.connect(tmp_path / "lake")
    with pytest.raises(JobError, match=r"`row_count .* the run does not start"):
        run(lake, config(expect={"tasks": [{"row_count": {"min": 10_000}}]}))
    assert (lake.count("job_events"), lake.count("experiences")) == (0, 0)


def test_unknown_columns_are_refused_with_their_key() -> None:
    with pytest.raises(ConfigError, match=r"`expect\.experiences`: .*`reward`"):
        check(config(expect={"experiences": [{"not_null": "rewrad"}]}))
    with pytest.raises(ValueError, match="did you mean `not_null`"):
        config(expect={"tasks": [{"not_nul": "answer"}]})
